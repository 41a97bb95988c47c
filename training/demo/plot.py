"""Draw loss.png from loss.jsonl (needs matplotlib, of the extra `dev`).

python training/demo/plot.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).parent
SMOOTHED_OVER = 10


def smooth(values: list[float]) -> list[float]:
    """Return the running mean of a few values: the loss of one batch varies about tenfold."""
    windows = (values[max(0, index - SMOOTHED_OVER + 1) : index + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def main() -> None:
    records = [json.loads(line) for line in (HERE / "loss.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records]
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for kind, color in (("problems", "tab:blue"), ("recalls", "tab:orange")):
        values = [max(record[f"{kind}_loss"], 1e-6) for record in records]
        axes.semilogy(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.semilogy(steps, smooth(values), color=color, label=f"{kind}: answer tokens")
    axes.set_xlabel("step (262,144 positions each)")
    axes.set_ylabel("cross-entropy, nats a token (drawn from 1e-6)")
    axes.grid(alpha=0.3)
    rate = axes.twinx()
    rate.plot(steps, [record["rate"] for record in records], color="gray", linestyle="--", label="learning rate")
    rate.set_ylabel("learning rate")
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(HERE / "loss.png", dpi=110)


if __name__ == "__main__":
    main()
