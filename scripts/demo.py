"""Plan and load a real checkpoint, and compare what it computes with numbers made elsewhere.

MiniLM (BertModel, 22.7 M parameters) is planned at tp 1, 2 and 4 from its header alone, then
loaded; the similarities of three sentences must equal those that transformers computed, to 1e-5.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from fetch_model import ROOT, FetchError, RegistryUnreachableError, fetch

ORACLE = ROOT / "tests" / "data" / "all-minilm-l6-v2.json"
TOLERANCE = 1e-5  # float32, another order of additions than the oracle's


def plan(folder: Path, tp: int) -> None:
    """Run ``loadkit plan`` and say what each rank would read."""
    command = [Path(sys.executable).with_name("loadkit"), "plan", folder, "--tp", str(tp), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    answer = json.loads(done.stdout)
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


def main() -> int:
    """Run the demo. Exit code 3: no registry; 1: the numbers differ."""
    try:
        folder = fetch("minilm")
    except FetchError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 3 if isinstance(error, RegistryUnreachableError) else 1
    oracle = json.loads(ORACLE.read_text())
    print("plan: from the header alone")
    for tp in (1, 2, 4):
        plan(folder, tp)
    print("load")
    cosine = similarities(folder, oracle["sentences"])
    print("similarities (the oracle's in brackets)")
    worst = 0.0
    for a, b in ((0, 1), (0, 2), (1, 2)):
        ours, theirs = cosine[a][b], oracle["cosine"][a][b]
        worst = max(worst, abs(ours - theirs))
        print(f"  {ours:9.6f} ({theirs:9.6f})  {oracle['sentences'][a]} / {oracle['sentences'][b]}")
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
