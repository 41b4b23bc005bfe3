"""The private names of torch that the package uses, and where the installed torch has them."""

import pkgutil

import pytest

FSDP = "torch.distributed.fsdp._fully_shard"
PLACES = {
    # process groups and FSDP
    "_world": "torch.distributed.distributed_c10d:_world.pg_map",
    "_get_backend": "torch.distributed:ProcessGroup._get_backend",
    "_timeout": "torch.distributed:ProcessGroupGloo._Options._timeout",
    "_get_fsdp_state": "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    "_set_unshard_async_op": "torch.distributed.fsdp:FSDPModule._set_unshard_async_op",
    "torch.distributed.fsdp._fully_shard._fully_shard": f"{FSDP}:_fully_shard",
    "_get_post_forward_mesh_info": f"{FSDP}:_fully_shard._get_post_forward_mesh_info",
    "torch.distributed.fsdp._fully_shard._fsdp_param": f"{FSDP}:_fsdp_param._chunk_with_empty",
    "_version": "torch:Tensor._version",
    "_local_tensor": "torch.distributed.tensor:DTensor._local_tensor",
    # operators
    "_softmax_backward_data": "torch:_softmax_backward_data",
    "_scaled_dot_product_": "torch:ops.aten._scaled_dot_product_flash_attention",
    "_is_avx512_bf16_supported": "torch.cpu:_is_avx512_bf16_supported",
    "_is_amx_tile_supported": "torch.cpu:_is_amx_tile_supported",
    "_is_mkldnn_bf16_supported": "torch:ops.mkldnn._is_mkldnn_bf16_supported",
    "_is_mkldnn_fp16_supported": "torch:ops.mkldnn._is_mkldnn_fp16_supported",
    "_foreach_add_": "torch:_foreach_add_",
    "_foreach_copy_": "torch:_foreach_copy_",
    "_foreach_div": "torch:_foreach_div",
    "_foreach_div_": "torch:_foreach_div_",
    "_foreach_mul": "torch:_foreach_mul",
    "_foreach_mul_": "torch:_foreach_mul_",
    "_foreach_norm": "torch:_foreach_norm",
    "_foreach_sub": "torch:_foreach_sub",
    "_foreach_sub_": "torch:_foreach_sub_",
    "_init_group": "torch.optim:AdamW._init_group",
    # the simulated step of `plan`
    "torch._subclasses.fake_tensor.FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.utils._python_dispatch.TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "_schema": "torch:ops.aten.relu.default._schema",
    "_allgather_base_": "torch:ops.c10d._allgather_base_",
    "_reduce_scatter_base_": "torch:ops.c10d._reduce_scatter_base_",
    "_unsafe_view": "torch:ops.aten._unsafe_view",
    "_foreach_zero_": "torch:ops.aten._foreach_zero_",
    # the rest
    "_record_memory_history": "torch.cuda.memory:_record_memory_history",
    "_dump_snapshot": "torch.cuda.memory:_dump_snapshot",
    "torch._dynamo": "torch._dynamo.convert_frame",
    "torch._inductor": "torch._inductor.compile_fx",
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of what it imports
@pytest.mark.parametrize("name", PLACES)
def test_the_installed_torch_has_the_name(name: str) -> None:
    assert pkgutil.resolve_name(PLACES[name]) is not None
