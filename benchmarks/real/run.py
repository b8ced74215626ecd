"""What the recipe is worth: SmolLM2-135M-Instruct's drafters trained and measured on one GPU, from prompts to a table.

    python benchmarks/real/run.py --target SMOLLM2 --gsm8k gsm8k.jsonl --arena arena.jsonl --output out --budget-s 1500
    python benchmarks/real/run.py ... --tiny                  the same code on a CPU; its figures are of no use

The target answers the prompts (GSM8K without its last 300, Arena-Hard and the project's own, a part of each kept for
evaluation), its states are captured once and stay on the GPU, and everything is trained from them: SpecForge's
OnlineDFlashModel in a plain loop, the plain DFlash recipe, the DDTree recipe, one change at a time from the plain
recipe, the best again with other seeds, several drafters with each kind of synchronisation, and one run through the
whole pipeline, and last one long run with further answers (it may need a call of its own). Each part writes
OUTPUT/parts/NAME.json and is not run again while that file is there; all of them together stand in the merged file
(`--merged`), from which parts are restored if the folder was lost. The answers are kept compressed (`--answers`).
`--budget-s` starts no part that would not end in time. See docs/results.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # measure.py and peers.py are shared by all benchmarks
    from experiment import main

    raise SystemExit(main())
