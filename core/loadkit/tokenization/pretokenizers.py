r"""How a byte-level BPE vocabulary cuts a text into words, by ``tokenizer.ggml.pre``.

Each kind is a list of regular expressions applied one after the other: what one matches becomes a
word of its own, and so does what lies between two matches. Merges never cross a word's border, so
a wrong kind gives wrong ids without any error: an unknown one is refused.

Source: the ``pre_tokenizer`` of each family's tokenizer.json, under the names GGUF files use.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRETOKENIZERS", "PreTokenizer"]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut a text.

    Attributes:
        patterns: regular expressions (Oniguruma), applied in order.
        ignore_merges: a word that is a token is that token, whatever merges would make of it.
        add_bos: the family begins every text with bos, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
# Letters that have case, in the scripts one old vocabulary lists.
_CASED = (
    r"\x{295}[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}"
    r"\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{10D40}-\x{10D8F}"
    r"\x{16E40}-\x{16EFF}\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}]]"
)
_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"


def _modern(digits: str, suffix: str = _SUFFIX, word: str = _WORD, signs: str = _SIGNS) -> str:
    """The expression most vocabularies since 2023 share, but for how many digits make a word."""
    return "|".join((suffix, word, digits, signs, _LINES))


def _by_case(digits: str, suffix: str) -> str:
    """Words end where upper case follows lower case."""
    return "|".join(
        (
            f"{_HEAD}[{_UPPER}]*[{_LOWER}]+{suffix}",
            f"{_HEAD}[{_UPPER}]+[{_LOWER}]*{suffix}",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            _LINES,
        )
    )


_LLAMA3 = _modern(r"\p{N}{1,3}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    _ASCII_SIGNS
    + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES,
)

_KINDS: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    (
        *("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
        *("exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert"),
    ): PreTokenizer((_GPT2,)),
    (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        "mellum2",
    ): PreTokenizer((r"\p{N}", _GPT2)),
    (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        "lfm2",
    ): PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    (
        *("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"),
        "kormo",
    ): PreTokenizer((_modern(r"\p{N}"),)),
    ("qwen35",): PreTokenizer(
        (
            _modern(
                r"\p{N}",
                word=_HEAD + r"[\p{L}\p{M}]+",
                signs=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            ),
        )
    ),
    ("minicpm5",): PreTokenizer((r"\p{N}{1,3}", _modern(r"\p{N}+")), ignore_merges=True),
    ("seed-coder",): PreTokenizer((_modern(r"\p{N}", signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|" + _SPACES,
        )
    ),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): PreTokenizer(
        (_by_case(r"\p{N}{1,3}", _SUFFIX + "?"),)
    ),
    ("tekken",): PreTokenizer((_by_case(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): PreTokenizer(_DEEPSEEK3),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("bloom", "poro-chat", "gpt3-finnish"): PreTokenizer(
        (r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+",)
    ),
    ("viking",): PreTokenizer(
        (r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+", r"\p{N}")
    ),
}

PRETOKENIZERS: dict[str, PreTokenizer] = {
    name: kind for names, kind in _KINDS.items() for name in names
}
