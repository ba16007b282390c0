"""Where a text may be cut so that its pieces, tokenised one by one, give the whole's token ids.

Two kinds of places are provably so, whatever stands around them:

- an added token (`<|im_start|>`): the library takes these out first, leftmost and longest, and
  handles what lies between on its own; unless one takes in blanks or looks at its neighbours, or
  the pre-tokeniser treats the head of a text unlike the rest;
- between a letter and a blank, under the pre-tokenisers of `_WORD_PATTERNS`: runs of letters are
  greedy, no alternative goes from a letter over to a blank, none looks back, and the only look
  ahead, `\\s+(?!\\S)`, is about the blanks before the next word.

A tokenizer that is not known to keep these rules is given whole texts.
"""

import re
from typing import Any, Final

CHUNK_CHARS: Final = 512
"""A long text is cut at the first safe place after so many characters."""
FINE_CHARS: Final = 64
"""So is what is left of it at its end: most of that is known when a prompt differs at its end only."""
MAX_GAP_CHARS: Final = 16 * 1024
"""A text without a safe place for so long is not searched on."""

_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"
_WORD_PATTERNS: Final = frozenset({
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}",
    rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{_TAIL}",
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
})  # fmt: skip
_OTHER_PATTERNS: Final = frozenset(
    {r"\p{N}{1,3}", r"\p{N}", r"[0-9]", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"}
)
_NORMALIZERS: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
_SAFE_CUT: Final = re.compile(r"(?<=[A-Za-z])(?=[ \t\n])")

WHOLE_TEXTS: Final = {"added_tokens": [{"content": " ", "lstrip": True}]}
"""Of a tokenizer that may not be cut at all."""
PROBE: Final = (
    "It's one of the harbour's 1234567 books, isn't it?  Two  spaces,\ttabs \t and\r\n\r\n ends.\n"
    "  indented = {\"key\": [1, 2.5e-3]}  # x_y ...!!! don't\n\n\nnaïve café e\u0301 日本語の 文字 x 文"
    " 👩‍👩‍👧‍👦 end\u00a0of\u2003it WE'LL We'll  \n a  b\tc\nd \n"
) * 3  # fmt: skip


class Segmenter:
    """Cuts texts for one tokenizer, given by the content of its `tokenizer.json`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        added = [token for token in spec.get("added_tokens") or () if token.get("content")]
        sought = [token["content"] for token in added if not token.get("normalized", True)]
        self._added = _added_pattern(added, sought, spec)
        self._firsts = sorted({content[0] for content in sought})
        pre_tokenizers = _flat(spec.get("pre_tokenizer"), "pretokenizers")
        normalizers = _flat(spec.get("normalizer"), "normalizers")
        self.cuts_inside = (
            self._added is not None
            and any(map(_splits_words, pre_tokenizers))
            and all(_splits_words(node) or _is_harmless(node) for node in pre_tokenizers)
            and all(node.get("type") in _NORMALIZERS for node in normalizers)
            and not any(re.search(r"\s", token["content"]) for token in added)
        )

    @property
    def cuts_at_added(self) -> bool:
        return self._added is not None

    def segments(self, text: str) -> list[str]:
        """Pieces that make up `text`, in order; none is empty."""
        if self._added is None:
            return [text] if text else []
        # To look for a character is a hundred times cheaper than to try a pattern at each place.
        may_have_some = len(text) > 1 and any(first in text for first in self._firsts)
        pieces = self._added.split(text) if may_have_some else [text]
        if not self.cuts_inside:
            return [piece for piece in pieces if piece]
        cut: list[str] = []
        for piece in pieces:
            if len(piece) <= CHUNK_CHARS:
                if piece:
                    cut.append(piece)
            else:
                cut += _chunks(piece)
        return cut


def _chunks(text: str) -> list[str]:
    """Places depend on what stands before them only, so that equal heads give equal chunks."""
    chunks: list[str] = []
    begun, length, find = 0, len(text), _SAFE_CUT.search
    for step in (CHUNK_CHARS, FINE_CHARS):
        while (start := begun + step) < length:
            found = find(text, start, start + MAX_GAP_CHARS)
            if found is None:
                break
            place = found.start()
            chunks.append(text[begun:place])
            begun = place
    chunks.append(text[begun:])
    return chunks


def _added_pattern(
    added: list[dict[str, Any]], sought: list[str], spec: dict[str, Any]
) -> re.Pattern[str] | None:
    """Matches added tokens as the library does, which are `sought` in a text as it came; None where
    cutting at them is not safe."""
    if any(
        token.get("lstrip") or token.get("rstrip") or token.get("single_word") for token in added
    ):
        return None
    if not all(map(_is_the_same_everywhere, _flat(spec.get("pre_tokenizer"), "pretokenizers"))):
        return None
    return re.compile(f"({_any_of(sought)})" if sought else r"(?!)")


def _any_of(words: list[str]) -> str:
    """A pattern that matches the longest of `words`: as a tree of characters, since some models
    have thousands of added tokens and an alternation tries them one after the other."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word)
    branches = [_branch(group) for group in by_first.values()]
    tree = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{tree})?" if "" in words else tree


def _branch(words: list[str]) -> str:
    """Of words with one head in common, which goes first."""
    first, last = min(words), max(words)
    length = next((i for i, char in enumerate(first) if char != last[i]), len(first))
    head = first[:length]
    rest = [word[len(head) :] for word in dict.fromkeys(words)]
    return re.escape(head) + (_any_of(rest) if any(rest) else "")


def _flat(node: Any, children: str) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokeniser, sequences laid open."""
    if node is None:
        return []
    if node.get("type") == "Sequence":
        return [step for child in node.get(children) or () for step in _flat(child, children)]
    return [node]


def _is_the_same_everywhere(node: dict[str, Any]) -> bool:
    """Whether it treats a piece alike wherever the piece stands."""
    kind = node.get("type")
    if kind == "Metaspace":
        return node.get("prepend_scheme") in ("always", "never")
    return kind in (
        "ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit",
        "BertPreTokenizer", "CharDelimiterSplit",
    )  # fmt: skip


def _splits_words(node: dict[str, Any]) -> bool:
    if node.get("type") == "ByteLevel":
        return node.get("add_prefix_space") is False and node.get("use_regex", True) is True
    return _isolates(node, _WORD_PATTERNS)


def _is_harmless(node: dict[str, Any]) -> bool:
    """Cuts at most inside of words or at digits."""
    if node.get("type") == "ByteLevel":
        return node.get("add_prefix_space") is False
    return node.get("type") == "Digits" or _isolates(node, _OTHER_PATTERNS)


def _isolates(node: dict[str, Any], patterns: frozenset[str]) -> bool:
    pattern = (node.get("pattern") or {}).get("Regex")
    plain = node.get("behavior") == "Isolated" and not node.get("invert")
    return node.get("type") == "Split" and pattern in patterns and plain
