"""Who has how many fruits: writes 400 conversations into stock.jsonl. Both questions need a call of a tool.

`python docs/examples/stock.py`, then `slipstream up conf/quickstart.yaml docs/examples/stock.yaml`.
"""

import json
import random
from pathlib import Path
from typing import Any

PEOPLE = ["Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"]
FRUITS = ["apples", "pears", "plums", "figs", "limes", "kiwis", "dates", "grapes"]
TEXTS = {"type": "object", "properties": {"who": {"type": "string"}, "what": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "count", "parameters": TEXTS}}


def asked(question: str, who: str, what: str, number: int) -> list[dict[str, Any]]:
    call = {"function": {"name": "count", "arguments": json.dumps({"who": who, "what": what})}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": str(number)},
        {"role": "assistant", "content": str(number)},
    ]


def conversation(rng: random.Random) -> dict[str, Any]:
    who, (one, other) = rng.choice(PEOPLE), rng.sample(FRUITS, 2)
    first, second = rng.sample(range(1, 31), 2)
    messages = asked(f"How many {one} has {who}?", who, one, first) + asked(f"And {other}?", who, other, second)
    return {"messages": messages, "tools": [TOOL], "answer": second}


if __name__ == "__main__":
    rng = random.Random(0)
    Path("stock.jsonl").write_text("".join(json.dumps(conversation(rng)) + "\n" for _ in range(400)))
