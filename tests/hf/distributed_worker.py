"""One of two processes of test_distributed.py, under torchrun: models whose rows, parameters or
heads are shared out give the gradients of a whole one, in float64.

Called with a folder of saved models. Prints a line of JSON: by model and way, the largest relative
difference of a gradient on either process, or the error.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import softfocus.hf  # noqa: F401  (registers the attention)

ROWS = 4
WAYS = "ddp", "fsdp", "tp", "context"


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)


def gradients(model, called, ids):
    """By parameter, of the loss of ids predicting themselves; whole ones."""
    called(input_ids=ids, labels=ids).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def shared_out(folder, way, ids):
    """The gradients with two processes, each of which has half of the rows or half of the heads."""
    if way == "tp":
        model = load(folder, tp_plan="auto")
        return gradients(model, model, ids)
    model = called = load(folder)
    if way == "context":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
            return gradients(model, model, ids)
    if way == "ddp":
        called = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return gradients(model, called, ids.chunk(dist.get_world_size())[dist.get_rank()])


def compared(folder, way, ids):
    model = load(folder)
    wanted = gradients(model, model, ids)
    try:
        found = shared_out(folder, way, ids)
    except ValueError as error:
        return str(error)
    differences = torch.stack([(found[name] - wanted[name]).norm() / wanted[name].norm() for name in wanted])
    worst = torch.where(differences.isfinite(), differences, math.inf).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ids = torch.randint(1, 61, (ROWS, 24), generator=torch.Generator().manual_seed(0))
    models = sorted(Path(folder).iterdir())
    found = {f"{model.name} {way}": compared(model, way, ids) for model in models for way in WAYS}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
