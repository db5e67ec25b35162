"""Writes sums in natural language, as rows of a prompt and an answer.

`python -m slipstream.tools.lab.gpu.sums FILE [LARGEST]`
"""

import json
import random
import sys
from pathlib import Path

NUM_ROWS = 2000


def main() -> None:
    path, largest = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 99
    draw, sums = random.Random(0), dict[tuple[int, str, int], None]()  # in random order: an evaluation plays the first
    while len(sums) < NUM_ROWS:
        sums[draw.randint(2, largest), draw.choice("+-"), draw.randint(2, largest)] = None
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for a, sign, b in sums:
            answer = a + b if sign == "+" else a - b
            file.write(json.dumps({"prompt": f"What is {a} {sign} {b}?", "answer": answer}) + "\n")


if __name__ == "__main__":
    main()
