(function () {
  "use strict";
  const STATE_EVERY_MS = 2000, CHARTS_EVERY_MS = 10000;
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const inks = {
    light: ["#0072b2", "#d55e00", "#009e73", "#a8458a", "#b07800", "#2a8fd0", "#666666", "#7a4fbf", "#8c510a", "#c0392b"],
    dark: ["#5cb3f0", "#ff8f4d", "#3fd0a0", "#e79bce", "#f2c14e", "#9bd8ff", "#b5b5b5", "#bfa3ff", "#d8a878", "#ff8a80"],
  };
  let chosen = null, shown = [];
  const lost = new Map();

  function element(id) { return document.getElementById(id); }

  function made(name, text) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function theme() { return chosen || (dark.matches ? "dark" : "light"); }

  // ---- figures and tables

  function showState(state) {
    if (state.error) {  // what stands below is old then
      element("detail").textContent = state.error;
      element("verdict").textContent = "";
      return;
    }
    document.title = state.run + ": " + state.state;
    element("run").textContent = state.run;
    element("detail").textContent = state.detail;
    element("verdict").textContent = state.verdict;
    element("figures").replaceChildren(...state.figures.map(function (pair) {
      const box = made("div");
      box.append(made("dt", pair[0]), made("dd", pair[1]));
      return box;
    }));
    fill("workers", state.workers);
    fill("gpus", state.gpus);
  }

  function fill(id, rows) {
    element(id + "-part").hidden = rows.length === 0;
    const names = [...element(id + "-part").querySelectorAll("thead th")].map(function (th) { return th.textContent; });
    element(id).replaceChildren(...rows.map(function (cells) {
      const row = made("tr"), head = made("th", cells[0]);
      head.scope = "row";
      row.append(head, ...cells.slice(1).map(function (cell, number) {
        const place = made("td", cell);
        place.dataset.name = names[number + 1];  // shown where the table is too wide for the window
        return place;
      }));
      return row;
    }));
  }

  // ---- charts

  function layoutOf(chart) {
    const style = getComputedStyle(root);
    const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
    const layout = structuredClone(chart.layout), narrow = window.innerWidth < 640;
    for (const name of Object.keys(layout)) {
      if (!/^[xy]axis/.test(name)) continue;
      Object.assign(layout[name], { gridcolor: line, zerolinecolor: line, linecolor: line });
      if (narrow) layout[name].fixedrange = true;
    }
    return Object.assign(layout, {
      uirevision: "kept",  // what the reader enlarged stays so when new figures come
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: "system-ui, sans-serif", size: narrow ? 11 : 13 },
      hoverlabel: { bgcolor: style.getPropertyValue("--panel").trim(), font: { color: ink } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      margin: { l: narrow ? 42 : 60, r: 12, t: 10, b: 44 },
      height: chart.height, autosize: true, dragmode: narrow ? false : "zoom",
    });
  }

  function tracesOf(chart) {
    const palette = inks[theme()];
    return chart.traces.map(function (trace) {
      const color = palette[trace.meta.c % palette.length];
      const dash = ["solid", "dash", "dot"][Math.floor(trace.meta.c / palette.length) % 3];
      const line = Object.assign({ dash: dash, width: 2 }, trace.line, { color: color });
      const copy = Object.assign({}, trace, { line: line, marker: { color: color, size: 6 } });
      if (trace.meta.fill) copy.fillcolor = color;
      return copy;
    });
  }

  function placeOf(chart) {
    const id = "chart-" + chart.key;
    if (!element(id)) {
      const section = made("section"), place = made("div");
      place.id = id;
      place.className = "chart";
      place.setAttribute("role", "img");
      place.style.minHeight = chart.height + "px";
      section.append(made("h2", chart.title), made("p", chart.note), place);
      element("charts").append(section);
    }
    return element(id);
  }

  function draw() {
    root.dataset.theme = theme();
    for (const chart of shown) {
      const place = placeOf(chart);
      place.setAttribute("aria-label", chart.title + ". " + chart.alt);
      Plotly.react(place, tracesOf(chart), layoutOf(chart), { responsive: true, displayModeBar: false });
    }
  }

  function showCharts(answer) {
    shown = answer.charts;
    draw();
    element("charts").dataset.drawn = String(Number(element("charts").dataset.drawn || 0) + 1);
  }

  // ---- asking, again and again

  async function follow(path, show, everyMs) {
    try {
      const answer = await fetch(path, { cache: "no-store" });
      if (!answer.ok) throw new Error("it answers " + answer.status);
      show(await answer.json());
      lost.delete(path);
    } catch (error) {
      if (!lost.has(path)) lost.set(path, new Date().toLocaleTimeString() + " (" + error.message + ")");
    }
    element("lost").hidden = lost.size === 0;
    element("lost").textContent = "No news from draftline watch since " + [...lost.values()][0] + "; asking again.";
    setTimeout(follow, everyMs, path, show, everyMs);
  }

  element("theme").addEventListener("click", function () {
    chosen = theme() === "dark" ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);
  root.dataset.theme = theme();
  follow("api/state", showState, STATE_EVERY_MS);
  follow("api/charts", showCharts, CHARTS_EVERY_MS);
})();
