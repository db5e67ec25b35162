"""Tokenizers with a real vocabulary of SentencePiece, as transformers' fast ones of several families build them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import mistral_common
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

from tests.common.text.small_tokenizer import chat_tokenizer

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
MISTRAL1 = LLAMA2.replace("' ' + m.content.strip() + ' ' + eos", "m.content + eos").replace(
    "bos_token + '[INST] '", "(bos_token if loop.first else '') + '[INST] '"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
PHI3 = ZEPHYR.replace("eos_token +", "'<|end|>' +").replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
PHI3_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama 2": {"template": LLAMA2, "scheme": "prepend"},
    "mistral 0.1": {"template": MISTRAL1, "scheme": "prepend"},
    "mistral, always": {"template": MISTRAL1, "scheme": "always"},
    "tinyllama": {"template": ZEPHYR, "scheme": "prepend"},
    "zephyr": {"template": ZEPHYR, "scheme": "first"},
    "phi-3": {"template": PHI3, "scheme": "prepend", "tokens": PHI3_TOKENS},
    "phi-3, first": {"template": PHI3, "scheme": "first", "tokens": PHI3_TOKENS},
    "never": {"template": ZEPHYR, "scheme": "never"},
}


@cache
def _vocabulary() -> str:
    """The pieces and merges of the first Mistral's vocabulary, which is made as Llama 2's."""
    read = sentencepiece.ModelProto()
    read.ParseFromString((Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1").read_bytes())
    vocabulary = {piece.piece: number for number, piece in enumerate(read.pieces)}
    merges = []
    for text, number in vocabulary.items():
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))] if read.pieces[number].type == 1 else []
        found = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        merges += [(number, *cut) for cut in sorted(found, key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))]
    return json.dumps({"vocab": vocabulary, "merges": [[left, right] for _, left, right in sorted(merges)]})


@cache
def sentence_piece(family: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a family with its chat template."""
    form, read = FAMILIES[family], json.loads(_vocabulary())
    merges = [tuple(merge) for merge in read["merges"]]
    unknown: dict[str, Any] = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    model = Tokenizer(models.BPE(vocab=read["vocab"], merges=merges, **unknown))
    if form["scheme"] == "prepend":  # of Llama's `legacy` tokenizers
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        model.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=form["scheme"], split=False)
    first_space = decoders.Strip(content=" ", left=1)
    spaces = decoders.Replace(Regex("▁"), " ")
    model.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), first_space])
    model.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokens = form.get("tokens", ())
    model.add_special_tokens([AddedToken(text, special=True, normalized=False, rstrip=True) for text in tokens])
    return chat_tokenizer(model, form["template"], bos_token="<s>", eos_token=tokens[0] if tokens else "</s>")
