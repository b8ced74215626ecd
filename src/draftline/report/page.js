(function () {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const inks = {
    light: ["#0072b2", "#d55e00", "#009e73", "#a8458a", "#b07800", "#2a8fd0", "#666666", "#7a4fbf", "#8c510a", "#c0392b"],
    dark: ["#5cb3f0", "#ff8f4d", "#3fd0a0", "#e79bce", "#f2c14e", "#9bd8ff", "#b5b5b5", "#bfa3ff", "#d8a878", "#ff8a80"],
  };
  const PAPER_PX = 680;
  let chosen = null;

  function theme() { return chosen || (dark.matches ? "dark" : "light"); }

  // Rows that the legend takes above the curves: its entries are as wide as the longest.
  function legendRows(chart) {
    const names = chart.traces.filter(function (t) { return t.showlegend !== false; }).map(function (t) { return t.name.length; });
    const columns = Math.floor((Math.min(window.innerWidth, 1088) - 60) / (7 * Math.max(0, ...names) + 45));
    return Math.ceil(names.length / Math.max(1, columns));
  }

  function heightOf(chart) { return chart.height + 20 * Math.max(0, legendRows(chart) - 2); }

  function layoutOf(chart) {
    const style = getComputedStyle(root);
    const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
    const layout = structuredClone(chart.layout);
    const narrow = window.innerWidth < 640;
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) {
        Object.assign(layout[name], { gridcolor: line, zerolinecolor: line, linecolor: line });
        if (name[0] === "y" && layout[name].fixedrange === undefined) layout[name].fixedrange = narrow;
        if (name[0] === "x" && narrow) layout[name].fixedrange = true;
      }
    }
    return Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: "system-ui, sans-serif", size: narrow ? 11 : 13 },
      hoverlabel: { bgcolor: style.getPropertyValue("--panel").trim(), font: { color: ink } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      margin: { l: narrow ? 42 : 60, r: 12, t: 10, b: 44 },
      height: heightOf(chart), autosize: true, dragmode: narrow ? false : "zoom",
    });
  }

  function tracesOf(chart) {
    const palette = inks[theme()];
    return chart.traces.map(function (trace) {
      const color = palette[trace.meta.c % palette.length];
      const dash = ["solid", "dash", "dot"][Math.floor(trace.meta.c / palette.length) % 3];
      const copy = Object.assign({}, trace, { line: Object.assign({ dash: dash, width: 2 }, trace.line, { color: color }) });
      copy.marker = { color: color, size: 6 };
      if (trace.meta.fill) copy.fillcolor = color;
      return copy;
    });
  }

  function draw(chart, width) {
    const place = document.getElementById("chart-" + chart.key);
    const layout = layoutOf(chart);
    if (width) Object.assign(layout, { width: width, autosize: false });
    Plotly.react(place, tracesOf(chart), layout, {
      responsive: true, displayModeBar: false,
    });
    place.dataset.drawn = "yes";
  }

  function redraw() {
    root.dataset.theme = theme();
    for (const chart of charts) {
      if (document.getElementById("chart-" + chart.key).dataset.drawn) draw(chart, 0);
    }
  }

  root.dataset.theme = theme();
  document.getElementById("theme").addEventListener("click", function () {
    chosen = theme() === "dark" ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", redraw);
  // Charts are drawn when they come near the view, so that a long page opens and scrolls at once.
  const near = new IntersectionObserver(function (entries) {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      near.unobserve(entry.target);
      draw(charts.find(function (chart) { return "chart-" + chart.key === entry.target.id; }), 0);
    }
  }, { rootMargin: "800px" });
  for (const chart of charts) {
    const place = document.getElementById("chart-" + chart.key);
    place.style.minHeight = heightOf(chart) + "px"; // so that nothing moves when it is drawn
    near.observe(place);
  }
  // On paper: light, as wide as a page, with the figures of each chart unfolded.
  let before = null;
  window.addEventListener("beforeprint", function () {
    before = { chosen: chosen, closed: document.querySelectorAll("details:not([open])") };
    chosen = "light";
    root.dataset.theme = "light";
    before.closed.forEach(function (d) { d.open = true; });
    charts.forEach(function (chart) { draw(chart, PAPER_PX); });
  });
  window.addEventListener("afterprint", function () {
    if (!before) return;
    before.closed.forEach(function (d) { d.open = false; });
    chosen = before.chosen;
    redraw();
  });
})();
