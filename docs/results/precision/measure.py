"""What rounding to bfloat16 does to mechanisms, place by place, and to the gradients of a small
model.

    python docs/results/precision/measure.py
    python docs/results/precision/measure.py --tables

Writes results.json beside itself, line by line as they are measured: some half an hour on a core.
--tables prints the tables of docs/precision.md from it.

``places``: attention in float64, with one place rounded to bfloat16 and all others exact. Rounding
has slope 1. 64 queries at the end of N keys of 64 dimensions, causal. "random": q, k, v are normal.
"peaked": keys in clusters of 8 around directions, and each query near one of these, so that some
eight keys have a cosine of 0.7 with it.

``model``: a GPT-NeoX of 2 layers, trained in float32 on the standard library's sources, then its
gradients on held-out text in several precisions, held against float64's. ``trainings``: the loss of
trainings in several precisions.

Over 400 lines: one script, so that whoever repeats the results needs this file alone.
"""

import argparse
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import softfocus.hf
from softfocus import attention
from softfocus.lab.run_folder.disk import write_atomically
from softfocus.mechanism import MAX_UNTHRESHOLDED_COUNT
from softfocus.reference import reweight, unit

MECHANISMS = {
    "softmax": None,
    "lssa": None,
    "lssar, p = 3": 3,
    "lssar, p = 7": 7,
    "lssar, p = 15": 15,
    "lssar, p = 31": 31,
}
PLACES = ("query and key", "unit query and key", "scores", "weights", "value", "gradient of the output", "parameters")
LENGTHS = (128, 1024, 4096)
QUERIES, DIM = 64, 64
HALF = 2.0**-7 * math.sqrt(0.541 / 12)
"""The root of the mean square of bfloat16's relative error: a step is 2^-7 of the power of two
below a number, whose logarithm is taken to be uniform: the mean of 1/x^2 over 1 <= x < 2 is then (1
- 1/4) / (2 log 2).
"""


def name_of(mechanism: str) -> Any:
    """As softfocus knows it."""
    power = MECHANISMS[mechanism]
    return mechanism if power is None else softfocus.named("lssar").replace(power=power)


def rounded(x: Tensor) -> Tensor:
    """To bfloat16 and back, with slope 1."""
    return x + (x.detach().bfloat16().to(x.dtype) - x.detach())


class Upstream(torch.autograd.Function):
    """The identity, whose gradient is rounded."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """X itself."""
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        """The gradient, rounded."""
        return grad.bfloat16().to(grad.dtype)


def drawn(kind: str, length: int, seed: int) -> tuple[Tensor, ...]:
    """Query, key, value and dL/d out, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value, above = normal(QUERIES, DIM), normal(length, DIM), normal(length, DIM), normal(QUERIES, DIM)
    if kind == "peaked":
        centres = unit(normal(max(1, (length - QUERIES) // 8), DIM))
        of_key = torch.randint(len(centres), (length,), generator=generator)
        of_query = torch.randint(len(centres), (QUERIES,), generator=generator)
        key = math.sqrt(DIM) * unit(0.8 * centres[of_key] + 0.6 * unit(key))
        query = 2.0 * math.sqrt(DIM) * unit(0.9 * centres[of_query] + math.sqrt(0.19) * unit(query))
    return query, key, value, above


def formula(
    mechanism: str, place: str, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Out, the weights, the scores, and the relative error of each weight in units of its
    score's.
    """

    def at(here: str, x: Tensor) -> Tensor:
        return rounded(x) if here == place else x

    power, length = MECHANISMS[mechanism], len(key)
    count = torch.arange(length - QUERIES + 1, length + 1, dtype=query.dtype)[:, None]
    visible = torch.arange(length) < count
    query, key, value = at("query and key", query), at("query and key", key), at("value", value)
    if mechanism == "softmax":
        scale: Tensor | float = 1 / math.sqrt(DIM)
    else:
        query, key = at("unit query and key", unit(query)), at("unit query and key", unit(key))
        scale = math.log(DIM) * count.log()
    scores = at("scores", scale * (query @ key.T))
    if mechanism == "softmax":
        weights, steep = scores.masked_fill(~visible, -math.inf).softmax(-1), scores
    else:
        f = torch.where(visible, nn.functional.softplus(scores, threshold=700), 0.0)
        weights = f / f.sum(-1, keepdim=True)
        steep = scores * scores.sigmoid() / f
        if power is not None:
            threshold = (count > MAX_UNTHRESHOLDED_COUNT) * f.sum(-1, keepdim=True) / count
            steep = power * scores * scores.sigmoid() / (f - threshold)
            weights = reweight(weights, count, power)[0]
    weights = at("weights", weights)
    return weights @ value, weights.detach(), scores.detach(), steep.detach()


def run(mechanism: str, place: str, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Out and the gradients of query, key and value."""
    *leaves, above = [x.clone().requires_grad_() for x in tensors]
    inputs = leaves
    if place == "parameters":  # x W for an orthogonal W, which is what is rounded
        generator = torch.Generator().manual_seed(1)
        turns = [torch.linalg.qr(torch.randn(DIM, DIM, generator=generator, dtype=torch.float64))[0] for _ in leaves]
        inputs = [x @ turn.T @ rounded(turn) for x, turn in zip(leaves, turns, strict=True)]
    out = formula(mechanism, place, *inputs)[0]
    if place == "gradient of the output":
        out = Upstream.apply(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, above.detach())]


def relative(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def predicted(mechanism: str, tensors: tuple[Tensor, ...]) -> tuple[float, float]:
    """The error of out from rounded scores to first order; and the mean of a weight's error in
    units of its score's.
    """
    out, weights, _scores, steep = formula(mechanism, "", *tensors[:3])
    steep = torch.where(weights > 0, steep, 0.0)
    apart = (tensors[2][None] - out[:, None]).square().sum(-1)
    error = HALF * float((weights.square() * steep.square() * apart).sum().sqrt() / out.norm())
    return error, float((weights * steep.abs()).sum(-1).mean() / weights.sum(-1).mean())


def summary(errors: list[float]) -> list[float]:
    """Mean and its standard error."""
    return [mean(errors), stdev(errors) / math.sqrt(len(errors)) if len(errors) > 1 else math.nan]


def measure_places(seeds: int) -> Iterator[dict[str, Any]]:
    """One line for each kind of scores, length, mechanism and place."""
    for kind in ("random", "peaked"):
        for length in LENGTHS:
            given = [drawn(kind, length, seed) for seed in range(seeds)]
            for mechanism in MECHANISMS:
                exact = [run(mechanism, "", tensors) for tensors in given]
                whole = attention(
                    *(x[None, None] for x in given[0][:3]),
                    is_causal=True,
                    mechanism=name_of(mechanism),
                    backend="reference",
                )
                assert relative(exact[0][0], whole[0, 0]) < 1e-9, mechanism
                first = [predicted(mechanism, tensors) for tensors in given]
                for place in PLACES:
                    if place == "unit query and key" and mechanism == "softmax":
                        continue
                    pairs = [
                        zip(run(mechanism, place, x), want, strict=True) for x, want in zip(given, exact, strict=True)
                    ]
                    errors = [[relative(*pair) for pair in pair_of] for pair_of in pairs]
                    names = ("out", "query.grad", "key.grad", "value.grad")
                    line = {n: summary([e[i] for e in errors]) for i, n in enumerate(names)}
                    if place == "scores":
                        line |= {
                            "predicted out": summary([x for x, _ in first]),
                            "factor": summary([x for _, x in first]),
                        }
                    yield {"scores": kind, "length": length, "mechanism": mechanism, "place": place, **line}


GROUPS = {
    "query, key, value": "query_key_value",
    "attention out": "attention.dense",
    "MLP": "mlp",
    "norms": "norm",
    "embeddings": "embed",
}
TOKENS, BATCH = 128, 8


def text() -> tuple[Tensor, Tensor]:
    """The standard library's sources as bytes: to train on, and held out."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    random.Random(0).shuffle(files)
    data = [torch.frombuffer(bytearray(path.read_bytes() or b"\n"), dtype=torch.uint8).long() for path in files]
    return torch.cat(data[:-20]), torch.cat(data[-20:])


def batch(source: Tensor, generator: torch.Generator) -> Tensor:
    """[BATCH, TOKENS] of it."""
    starts = torch.randint(len(source) - TOKENS, (BATCH,), generator=generator)
    return torch.stack([source[i : i + TOKENS] for i in starts.tolist()])


def trained(mechanism: str, seed: int, steps: int, source: Tensor, precision: str = "float32") -> GPTNeoXForCausalLM:
    """A small model."""
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=TOKENS, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = softfocus.hf.use(GPTNeoXForCausalLM(config), name_of(mechanism))
    if precision == "parameters in bfloat16":
        model.bfloat16()
    if precision == "autocast, attention modules in float32":
        apart(model)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: min(1, (n + 1) / 50) * (1 - 0.9 * n / steps))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = batch(source, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision.startswith("autocast")):
            loss = model(ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    return model


def gradients(model: GPTNeoXForCausalLM, ids: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    """By parameter."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(ids).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def without_autocast(module: nn.Module) -> None:
    """Runs a module in float32 inside autocast."""
    inner = module.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return inner(hidden.float(), *args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def apart(model: GPTNeoXForCausalLM, part: str = "attention") -> None:
    """Runs a part of each layer in float32 inside autocast."""
    for layer in model.gpt_neox.layers:
        without_autocast(layer.get_submodule(part))


def by_group(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of the gradients, group by group."""

    def of(part: str) -> float:
        names = [name for name in want if part in name]
        return relative(torch.cat([got[n].flatten() for n in names]), torch.cat([want[n].flatten() for n in names]))

    return {"all": of(""), **{group: of(part) for group, part in GROUPS.items()}}


def measure_model(mechanism: str, seed: int, steps: int, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The relative errors of one model's gradients, and the share of parameters that a step of
    bfloat16 leaves as they are.
    """
    model = trained(mechanism, seed, steps, data[0])
    ids = batch(data[1], torch.Generator().manual_seed(1000 + seed))
    state = {name: x.clone() for name, x in model.state_dict().items()}

    def fresh(change: Callable[[GPTNeoXForCausalLM], Any] = lambda model: None) -> GPTNeoXForCausalLM:
        other = softfocus.hf.use(GPTNeoXForCausalLM(model.config), name_of(mechanism))
        other.load_state_dict(state)
        change(other)
        return other

    def coarse(model: GPTNeoXForCausalLM) -> None:
        for p in model.parameters():
            p.data = p.data.bfloat16().float()

    want = gradients(fresh(lambda m: m.double()), ids)
    on_coarse = gradients(fresh(lambda m: (coarse(m), m.double())), ids)
    in_bfloat16 = gradients(fresh(lambda m: m.bfloat16()), ids)
    errors = {
        "float32": by_group(gradients(fresh(), ids), want),
        "autocast": by_group(gradients(fresh(), ids, autocast=True), want),
        "autocast, their projection in float32": by_group(
            gradients(fresh(lambda m: apart(m, "attention.query_key_value")), ids, autocast=True), want
        ),
        "autocast, attention modules in float32": by_group(gradients(fresh(apart), ids, autocast=True), want),
        "parameters rounded, float64": by_group(on_coarse, want),
        "parameters in bfloat16": by_group(in_bfloat16, want),
        "parameters in bfloat16, against float64 on the rounded": by_group(in_bfloat16, on_coarse),
    }
    with torch.no_grad():
        held_out = float(fresh()(ids, labels=ids).loss)
    lost = {}
    for rate in (1e-4, 1e-3):
        weights = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if p.dim() > 1])
        coarse_weights = weights.bfloat16()
        lost[str(rate)] = float(((coarse_weights.float() + rate).bfloat16() == coarse_weights).float().mean())
    return {"mechanism": mechanism, "seed": seed, "loss": held_out, "errors": errors, "updates lost": lost}


def table(head: list[str], lines: list[list[str]]) -> None:
    """As Markdown."""
    print("|", " | ".join(head), "|")
    print("|" + "---|" * len(head))
    for line in lines:
        print("|", " | ".join(line), "|")
    print()


def percent(errors: list[float]) -> str:
    """Mean and standard error of relative errors."""
    return f"{100 * errors[0]:.2f} ± {100 * errors[1]:.2f}"


def tables(results: dict[str, Any]) -> None:
    """Prints them."""
    at = {(x["scores"], x["length"], x["mechanism"], x["place"]): x for x in results["places"]}
    for kind in ("random", "peaked"):
        for what in ("out", "query.grad"):
            print(f"{what}, {kind} scores, N = 1024\n")
            lines = [
                [
                    m,
                    *(
                        percent(at[kind, 1024, m, place][what]) if (kind, 1024, m, place) in at else ""
                        for place in PLACES
                    ),
                ]
                for m in MECHANISMS
            ]
            table(["%", *PLACES], lines)
    print("out from rounded scores: measured, predicted, factor\n")
    for kind in ("random", "peaked"):
        cells = [[at[kind, n, m, "scores"] for n in LENGTHS] for m in MECHANISMS]
        lines = [
            [m, *(f"{percent(x['out'])}, {percent(x['predicted out'])}, {x['factor'][0]:.1f}" for x in row)]
            for m, row in zip(MECHANISMS, cells, strict=True)
        ]
        table([kind, *map(str, LENGTHS)], lines)

    def over_seeds(mechanism: str, precision: str, group: str) -> str:
        found = [x["errors"][precision][group] for x in results["models"] if x["mechanism"] == mechanism]
        return percent(summary(found))

    precisions = list(results["models"][0]["errors"])[1:]
    table(["%", *precisions], [[m, *(over_seeds(m, x, "all") for x in precisions)] for m in MECHANISMS])
    for precision in ("autocast", "parameters in bfloat16"):
        print(precision, "by group\n")
        table(["%", *GROUPS], [[m, *(over_seeds(m, precision, group) for group in GROUPS)] for m in MECHANISMS])
    runs = results.get("trainings", [])
    lines = []
    for mechanism in dict.fromkeys(x["mechanism"] for x in runs):
        base = {x["seed"]: x["loss"] for x in runs if (x["mechanism"], x["precision"]) == (mechanism, "float32")}
        for precision in dict.fromkeys(x["precision"] for x in runs):
            some = [x for x in runs if (x["mechanism"], x["precision"]) == (mechanism, precision)]
            loss = summary([x["loss"] for x in some])
            more = summary([x["loss"] - base[x["seed"]] for x in some])
            lines.append([mechanism, precision, f"{loss[0]:.3f} ± {loss[1]:.3f}", f"{more[0]:+.3f} ± {more[1]:.3f}"])
    table(["", "", "loss", "beside float32"], lines)


PRECISIONS = ("float32", "autocast", "autocast, attention modules in float32", "parameters in bfloat16")


def measure_trainings(seeds: int, steps: int, data: tuple[Tensor, Tensor]) -> Iterator[dict[str, Any]]:
    """The loss on held-out text, in float32, of trainings in each precision."""
    held_out = torch.cat([batch(data[1], torch.Generator().manual_seed(seed)) for seed in range(8)])
    for seed in range(seeds):
        for mechanism in ("softmax", "lssar, p = 15"):
            for precision in PRECISIONS:
                model = trained(mechanism, seed, steps, data[0], precision).float()
                with torch.no_grad():
                    loss = float(model(held_out, labels=held_out).loss)
                yield {"mechanism": mechanism, "seed": seed, "precision": precision, "loss": loss}


def main() -> None:
    """Measures and writes, or prints."""
    parser = argparse.ArgumentParser(description="rounding to bfloat16, place by place and in a small model")
    parser.add_argument("--draws", type=int, default=5, help="of each attention problem")
    parser.add_argument(
        "--models", type=int, default=3, help="trainings of each mechanism whose gradients are measured"
    )
    parser.add_argument("--trainings", type=int, default=5, help="in each precision")
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--part", choices=("places", "models", "trainings"), help="measure this anew, keep the others")
    parser.add_argument("--tables", action="store_true", help="print the tables of what was measured")
    options = parser.parse_args()
    to = Path(__file__).with_name("results.json")
    if options.tables:
        tables(json.loads(to.read_text()))
        return
    data = text()
    models = (
        measure_model(mechanism, seed, options.steps, data)
        for seed in range(options.models)
        for mechanism in MECHANISMS
    )
    parts: dict[str, Iterator[dict[str, Any]]] = {
        "places": measure_places(options.draws),
        "models": models,
        "trainings": measure_trainings(options.trainings, options.steps, data),
    }
    results: dict[str, Any] = json.loads(to.read_text()) if options.part else {}
    results |= {"torch": torch.__version__, "steps": options.steps}
    for part in [options.part] if options.part else parts:
        results[part] = []
        for line in parts[part]:
            results[part].append(line)
            print(part, {name: x for name, x in line.items() if isinstance(x, str | int | float)}, flush=True)
            write_atomically(to, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
