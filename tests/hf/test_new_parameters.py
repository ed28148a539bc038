"""Where the parameters that heads learn are put, and models to which none can be added any more."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import softfocus.hf
from softfocus.hf import learned


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.long
def test_a_sharded_model_takes_no_new_parameters(build, tokens, mesh):
    """What FSDP has not found it does not synchronise."""
    model, ids = build("llama", "lssa"), tokens(1, 9)
    with torch.no_grad():
        want = model(ids).logits
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for change in ("ssmax", {"0": "lssa", "*": "qknorm"}):
        with pytest.raises(
            ValueError, match=r"learns head_scale, .* sharded already .* before wrapping it in DDP or F"
        ):
            softfocus.hf.use(model, change)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, want)
    softfocus.hf.assign(softfocus.hf.use(model, "lssar"), "lssar_p3")
    assert str(softfocus.hf.layout_of(model)) == "lssar_p3"


def test_a_data_parallel_model_is_told_to_call_use_before(build, mesh):
    wrapped = nn.parallel.DistributedDataParallel(build("llama", "lssar"))
    with pytest.raises(
        TypeError, match=r"^target: got DistributedDataParallel, .*: call it before wrapping\. To assign"
    ):
        softfocus.hf.use(wrapped, "ssmax")


@pytest.mark.parametrize("buffers", [False, True])
def test_heads_learn_where_weights_of_integers_are(build, buffers):
    """GPTQ's are buffers."""
    model = build("llama")
    for module in list(model.model.modules()):
        if isinstance(module, nn.Linear):
            weight = module.weight.data.to("meta", torch.int8)
            del module.weight
            if buffers:
                module.register_buffer("weight", weight)
            else:
                module.weight = nn.Parameter(weight, requires_grad=False)
    softfocus.hf.use(model, "ssmax")
    scale = model.model.layers[0].self_attn.softfocus_head_scale
    assert (scale.device.type, scale.dtype) == ("meta", torch.float32)
    assert learned.weight_of(model.model.layers[0].self_attn).device.type == "meta"


def test_offloaded_weights_take_no_new_parameters(build):
    model = build("llama", "lssar")
    model.hf_device_map = {"": "disk"}
    softfocus.hf.use(model, "ssmax")
    model.model.layers[1].self_attn.to("meta")
    for part in (model, model.model):
        with pytest.raises(ValueError, match=r"learns head_scale, .* offloaded .* on the config before loading"):
            softfocus.hf.use(part, "qknorm")
    assert str(softfocus.hf.layout_of(model)) == "ssmax"
    softfocus.hf.use(model, "lssar")
