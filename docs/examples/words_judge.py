"""A judge for words.yaml, on port 8765: a script that gives 10 to one word and 0 to more, in place of a model."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = json.loads(request["messages"][-1]["content"])
        reply = [each["content"] for each in shown["conversation"] if each["role"] == "assistant"][-1]
        mark = 10 if len(reply.split()) == 1 else 0
        answer = {"choices": [{"message": {"role": "assistant", "content": str(mark)}}], "usage": {"total_tokens": 1}}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8765), Judge).serve_forever()
