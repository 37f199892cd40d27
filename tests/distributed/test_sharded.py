"""What torch's FSDP makes of a model is recognised, and refused in one line."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import selectconv as sc
from tiny_models import conv_net


@pytest.mark.filterwarnings("ignore")
def test_fully_shard_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = conv_net()
        fully_shard(model.conv1, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="`model` is sharded by FSDP, which is not supported"):
            sc.ChannelAllocator(model, total_epochs=2)
    finally:
        dist.destroy_process_group()
