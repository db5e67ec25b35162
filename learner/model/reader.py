"""`python -P -m slipstream.learner.model.reader FOLDER` reads an exported folder by transformers alone, of any version.

From a text and tokens as JSON, it prints the version, the text's tokens, and the log-probabilities of the others.
"""

import json
import sys

import torch
import transformers

if __name__ == "__main__":
    folder, (text, tokens) = sys.argv[1], json.load(sys.stdin)
    (kind,) = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures
    model = getattr(transformers, kind).from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float()
    absent = set(range(logits.shape[1])) - set(tokenizer.get_vocab().values())
    logits[:, sorted(absent)] = -torch.inf  # as in training, these ids have no probability
    table = logits.log_softmax(-1)
    logprobs = table[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).flatten().tolist()
    print(json.dumps([transformers.__version__, tokenizer(text)["input_ids"], logprobs]))
