"""The BM25 ranking function (Robertson and Zaragoza, 2009), with Lucene's non-negative inverse document frequency.

    score(q, d) = sum over t in q of idf(t) * f(t, d) * (k1 + 1) / (f(t, d) + k1 * (1 - b + b * |d| / mean |d|))
    idf(t)      = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

f(t, d) counts term t in document d, n(t) counts the documents with t, and N counts all. With documents
["red mug"], ["blue mug"] and ["red red hat"], query "mug" scores the first two 0.470 * 1.9 / (1 + 0.9 * 0.943) = 0.483.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

K1 = 0.9
B = 0.4  # both as in Pyserini, the search library that WebShop uses

_WORD = re.compile(r"[a-z0-9]+")


def words(text: str) -> list[str]:
    """Return the terms of a text: runs of letters and digits, in lower case."""
    return _WORD.findall(text.lower())


class Bm25:
    """A search index in memory, for a few hundred documents."""

    def __init__(self, documents: Sequence[str]) -> None:
        terms = [words(document) for document in documents]
        mean_length = sum(map(len, terms)) / len(terms)
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for document, document_terms in enumerate(terms):
            length_penalty = K1 * (1 - B + B * len(document_terms) / mean_length)
            for term, count in Counter(document_terms).items():
                self._postings[term].append((document, count * (K1 + 1) / (count + length_penalty)))
        self._num_documents = len(terms)

    def scores(self, query: str) -> dict[int, float]:
        """Return the score of each document that shares a term with `query`, by the document's position."""
        totals: dict[int, float] = defaultdict(float)
        for term in words(query):
            found = self._postings.get(term, [])
            idf = math.log(1 + (self._num_documents - len(found) + 0.5) / (len(found) + 0.5))
            for document, weight in found:
                totals[document] += idf * weight
        return dict(totals)

    def rank(self, query: str) -> list[int]:
        """Return the positions of the documents that share a term with `query`, best first; ties keep their order."""
        totals = self.scores(query)
        return sorted(totals, key=lambda document: (-totals[document], document))
