"""An agent that is a command: it has the policy choose the first search of a shop, by a call of a tool."""

import json
import os
import urllib.request

TOOL = {
    "type": "function",
    "function": {"name": "act", "parameters": {"type": "object", "properties": {"action": {"type": "string"}}}},
}
task = json.loads(os.environ["SLIPSTREAM_TASK"])
body = {"model": "policy", "messages": [{"role": "user", "content": task["question"]}], "tools": [TOOL]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
actions = [json.loads(call["function"]["arguments"]).get("action", "") for call in message.get("tool_calls", [])]
print(float(["".join(str(action).split()) for action in actions] == ["".join(task["answer"].split())]))
