"""Plan and load real checkpoints, and compare what they compute with numbers made elsewhere.

MiniLM (BertModel, 22.7 M parameters, safetensors) is planned at tp 1, 2 and 4 from its header
alone, then loaded; the similarities of three sentences must equal those that transformers
computed, to 1e-5. SmolLM2 (Llama, 134.5 M parameters, one GGUF file) is planned and goes on with
a prompt; its first ids must be those of llama.cpp.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fetch_model import ROOT, FetchError, RegistryUnreachableError, fetch

ORACLE = ROOT / "tests" / "data" / "all-minilm-l6-v2.json"
SPEECH = ROOT / "tests" / "data" / "smollm2-135m-dequant-f32.llamacpp.json"
SAID = 12  # ids that are compared; later ones may hang on the last bits
TOLERANCE = 1e-5  # float32, another order of additions than the oracle's


def loadkit_command(*arguments: str | Path) -> Any:
    """Run ``loadkit ... --json`` and give its answer."""
    command = [Path(sys.executable).with_name("loadkit"), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def plan(source: Path, tp: int) -> None:
    """Say what each rank would read."""
    answer = loadkit_command("plan", source, "--tp", str(tp))
    reads = ", ".join(f"{rank['bytes_to_read'] / 1e6:.1f} MB" for rank in answer["ranks"])
    print(f"  tp {tp}: ok={answer['ok']}, {answer['model_class']}, each rank reads {reads}")


def similarities(folder: Path, sentences: list[str]) -> list[list[float]]:
    """Cosine similarities ``[N, N]`` of the sentences' mean-pooled embeddings."""
    import torch

    import loadkit
    from loadkit.tokenization import from_tokenizer_json

    begin = time.perf_counter()
    result = loadkit.load(folder)
    seconds = time.perf_counter() - begin
    report = result.report.to_dict()
    print(f"  {seconds:.2f} s, {report['bytes_read'] / 1e6:.1f} MB, reader {report['reader']}")

    tokenizer = from_tokenizer_json((folder / "tokenizer.json").read_bytes())
    lines = [tokenizer.encode(sentence) for sentence in sentences]
    lengths = [len(line) for line in lines]
    ids = torch.tensor([token for line in lines for token in line])  # [T], packed
    positions = torch.cat([torch.arange(length) for length in lengths])  # [T]
    borders = torch.tensor([0, *lengths]).cumsum(0)  # [N + 1]
    with torch.no_grad():
        hidden = result.model(ids, positions, cu_seqlens=borders)  # [T, D]
    pooled = torch.stack([part.mean(0) for part in hidden.split(lengths)])  # [N, D]
    unit = torch.nn.functional.normalize(pooled)
    return (unit @ unit.T).tolist()


def compare_sentences(folder: Path) -> bool:
    """MiniLM: plans, the load, and three sentences against the oracle."""
    oracle = json.loads(ORACLE.read_text())
    print("MiniLM, planned from the header alone")
    for tp in (1, 2, 4):
        plan(folder, tp)
    print("loaded")
    cosine = similarities(folder, oracle["sentences"])
    print("similarities (the oracle's in brackets)")
    worst = 0.0
    for a, b in ((0, 1), (0, 2), (1, 2)):
        ours, theirs = cosine[a][b], oracle["cosine"][a][b]
        worst = max(worst, abs(ours - theirs))
        print(f"  {ours:9.6f} ({theirs:9.6f})  {oracle['sentences'][a]} / {oracle['sentences'][b]}")
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return worst <= TOLERANCE


def speak(folder: Path) -> bool:
    """SmolLM2: plans, and the continuation of the oracle's first prompt, in float32."""
    oracle = json.loads(SPEECH.read_text())["prompts"]["p1"]
    source = next(folder.glob("*.gguf"))
    print("SmolLM2, one GGUF file")
    for tp in (1, 3):
        plan(source, tp)
    answer = loadkit_command(
        "generate", source, "--prompt", oracle["text"], "--dtype", "float32",
        "--max-new-tokens", str(len(oracle["greedy24_ids"])), "--ignore-eos",
    )  # fmt: skip
    print(f"  {oracle['text']}|{answer['text']}")
    same = answer["output_ids"][:SAID] == oracle["greedy24_ids"][:SAID]
    print(f"first {SAID} ids {'are' if same else 'ARE NOT'} those of llama.cpp")
    return same


def main() -> int:
    """Run the demo. Exit code 3: no registry; 1: the numbers differ."""
    try:
        minilm, smollm2 = fetch("minilm"), fetch("smollm2")
    except FetchError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 3 if isinstance(error, RegistryUnreachableError) else 1
    good = [compare_sentences(minilm), speak(smollm2)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
