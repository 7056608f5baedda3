"""The offloader empties and refills storages of plain tensors in place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.memory.host_memory import HostBuffer
from mcore_rl.hybrid_engine.memory.offload import Offloader, kinds_at_start, offload_kinds
from mcore_rl.megatron import adapter as megatron_adapter

CPU = torch.device("cpu")
ALL = frozenset({"parameters", "optimizer", "gradients"})


class Training:
    """A model as Megatron lays it out: parameters and gradients are views of buffers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.buffer = torch.randn(3001, generator=generator).bfloat16()
        self.weight = torch.nn.Parameter(self.buffer[10:910].view(30, 30))
        self.tied = torch.nn.Parameter(self.buffer[10:910].view(30, 30))
        self.own = torch.nn.Parameter(torch.randn(7, 5, generator=generator))
        self.grad_buffer = torch.randn(3001, generator=generator)
        self.main_grad = self.grad_buffer[10:910].view(30, 30)
        self.main = self.weight.detach().clone().float()
        self.shard_of_own = self.own.detach().view(-1)[3:20]  # as a float32 run has it
        self.moments = [torch.randn(30, 30, generator=generator) for _ in range(2)]
        # A float32 gradient that is the main parameter's memory must not be forgotten with it.
        self.alias_of_moment = self.moments[0].view(-1)[:10]

    def tensors(self) -> dict[str, list[tuple[str, torch.Tensor]]]:
        return {
            "gradients": [("grads", self.grad_buffer), ("alias", self.alias_of_moment)],
            "optimizer": [
                ("main", self.main),
                ("shard", self.shard_of_own),
                *((f"moment{i}", m) for i, m in enumerate(self.moments)),
            ],
            "parameters": [("weight", self.weight), ("tied", self.tied), ("own", self.own)],
        }

    def views(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if torch.is_tensor(value)} | {
            f"moment{i}": moment for i, moment in enumerate(self.moments)
        }

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.views().items()}


def offloader(training: Training, what: frozenset[str] = ALL, **options) -> Offloader:
    # Chunks of 1 KiB: storages run over their borders.
    return Offloader(training.tensors, what, device=CPU, **{"chunk_bytes": 1024, **options})


def assert_equal_but_gradients(training: Training, before: dict[str, torch.Tensor]) -> None:
    for name, value in training.views().items():
        if name in ("grad_buffer", "main_grad"):
            assert not value.any(), name
        else:
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("chunk_bytes", [1 << 10, 1 << 20], ids=["storages", "arenas"])
def test_cycle_restores_every_view_bit_for_bit(chunk_bytes: int) -> None:
    training = Training()
    before, addresses = training.copies(), {n: id(v) for n, v in training.views().items()}
    offloading = offloader(training, keep_gradients=True, chunk_bytes=chunk_bytes)
    for _ in range(2):
        offloading.offload()
        storages = [v.untyped_storage() for v in training.views().values()]
        assert {storage.nbytes() for storage in storages} == {0}
        offloading.onload()
        for name, value in training.views().items():
            assert torch.equal(value, before[name]), name
    assert {n: id(v) for n, v in training.views().items()} == addresses
    with torch.no_grad():
        training.tied.fill_(3.0)
        training.own.fill_(4.0)
    assert (training.weight == 3).all() and (training.buffer[10:910] == 3).all()
    assert (training.shard_of_own == 4).all()


def test_state_of_an_optimizer_leaves_in_a_few_arenas() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 2000, (3000,), generator=generator).tolist()
    state = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]
    state += [torch.randint(0, 9, (n,), dtype=torch.uint8, generator=generator) for n in (1, 7)]
    large, scalar = torch.randn(1 << 20, generator=generator), torch.tensor(3.0)
    view = state[5].view(-1)  # another object uses this memory
    tensors = {"parameters": [], "gradients": []}
    tensors["optimizer"] = [(str(n), each) for n, each in enumerate([*state, large, scalar])]
    before = [each.detach().clone() for _, each in tensors["optimizer"]]
    offloading = Offloader(lambda: tensors, ALL, device=CPU, chunk_bytes=1 << 20)
    for _ in range(2):
        offloading.offload()
        # 12.6 MB in arenas of 1 MiB, what is larger, and what has a view.
        places = {each.untyped_storage()._cdata for _, each in tensors["optimizer"]}
        assert len(places) == 13 + 2
        offloading.onload()
        for (name, each), was in zip(tensors["optimizer"], before, strict=True):
            assert torch.equal(each, was), name
    with torch.no_grad():
        state[5].fill_(2.0)
    assert (view == 2).all()


def test_nan_payloads_and_odd_sizes_survive() -> None:
    bits = torch.randint(0, 256, (4099,), dtype=torch.uint8, generator=torch.Generator())
    halves = bits[:4098].clone().view(torch.bfloat16)
    assert halves.isnan().any()
    tensors = {"parameters": [("a", bits), ("b", halves)], "optimizer": [], "gradients": []}
    offloading = Offloader(lambda: tensors, ALL, device=CPU, chunk_bytes=512)
    expected = bits.clone(), halves.clone().view(torch.int16)
    offloading.offload()
    offloading.onload()
    assert torch.equal(bits, expected[0])
    assert torch.equal(halves.view(torch.int16), expected[1])


@pytest.mark.parametrize("what", [{"gradients"}, {"optimizer"}, {"parameters"}, set()])
def test_only_given_kinds_are_offloaded(what: set[str]) -> None:
    training = Training()
    offloading = offloader(training, frozenset(what))
    offloading.offload()
    assert offloading.offloaded == what
    gone = {n for n, v in training.views().items() if v.untyped_storage().nbytes() == 0}
    assert (
        gone
        == {
            "gradients": {"grad_buffer", "main_grad"},
            "optimizer": {"main", "moment0", "moment1", "alias_of_moment"},
            # The float32 main parameter is the parameter itself, and leaves with it.
            "parameters": {"buffer", "weight", "tied", "own", "shard_of_own"},
            "": set(),
        }["".join(what)]
    )
    offloading.onload()
    assert not offloading.offloaded


def test_kinds_leave_in_two_steps_and_prefetch_restores_copies() -> None:
    training = Training()
    before = training.copies()
    offloading = offloader(training)
    offloading.offload("gradients", "optimizer")
    assert training.weight.untyped_storage().nbytes() > 0
    offloading.offload("parameters")
    copied = sum(v.untyped_storage().nbytes() for v in Training().moments) + 30 * 30 * 4
    copied += 3001 * 2 + 7 * 5 * 4
    assert offloading.prefetch() == copied == offloading.stats.moved_bytes
    assert torch.equal(training.moments[1], before["moment1"])
    assert training.grad_buffer.untyped_storage().nbytes() == 0  # zeros can wait
    assert offloading.prefetch() == 0
    offloading.onload()
    assert_equal_but_gradients(training, before)


def test_one_kind_can_be_onloaded_first() -> None:
    training = Training()
    before = training.copies()
    offloading = offloader(training)
    offloading.offload()
    offloading.onload("parameters")
    assert offloading.offloaded == {"optimizer", "gradients"}
    assert torch.equal(training.weight, before["weight"])
    assert training.main.untyped_storage().nbytes() == 0
    offloading.offload("parameters")
    offloading.onload()
    assert_equal_but_gradients(training, before)


def test_stats_count_bytes_of_each_kind() -> None:
    training = Training()
    moments = 2 * 30 * 30 * 4 + 30 * 30 * 4  # and the main parameter
    weights = 3001 * 2 + 7 * 5 * 4
    offloading = offloader(training)
    offloading.offload("gradients", "optimizer")
    offloading.offload("parameters")
    stats = offloading.stats
    assert stats.moved == {"gradients": 0, "optimizer": moments, "parameters": weights}
    assert stats.dropped == {"gradients": 3001 * 4, "optimizer": 0, "parameters": 0}
    # Without a device the copies are in the memory that was freed.
    assert stats.saved == stats.dropped
    assert offloading.host_bytes >= stats.moved_bytes > 0
    assert stats.moved_bytes == moments + weights
    of_away = stats.of(frozenset({"gradients", "parameters"}))
    assert of_away.moved == {"gradients": 0, "parameters": weights}
    assert of_away.moved_bytes == weights and of_away.saved_bytes == 3001 * 4
    offloading.onload()
    assert offloading.host_bytes == 0
    assert of_away.moved_bytes == weights, "a copy"
    kept = offloader(training, keep_gradients=True)
    kept.offload("gradients")
    assert kept.stats.moved == {"gradients": 3001 * 4} and kept.stats.dropped == {"gradients": 0}
    kept.onload()


def test_state_that_appears_later_is_offloaded() -> None:
    training = Training()
    moments, training.moments = training.moments, []
    offloading = offloader(training, frozenset({"optimizer"}))
    offloading.offload()
    offloading.onload()
    training.moments = moments
    expected = [moment.clone() for moment in moments]
    offloading.offload()
    assert moments[0].untyped_storage().nbytes() == 0
    offloading.onload()
    assert all(torch.equal(a, b) for a, b in zip(moments, expected, strict=True))


def test_calls_out_of_order_are_refused() -> None:
    training = Training()
    offloading = offloader(training)
    with pytest.raises(RuntimeError, match="onload was called, but nothing is offloaded"):
        offloading.onload()
    with pytest.raises(RuntimeError, match="prefetch was called, but nothing is offloaded"):
        offloading.prefetch()
    offloading.offload("optimizer")
    with pytest.raises(RuntimeError, match="optimizer are offloaded already"):
        offloading.offload()
    offloading.onload()
    with pytest.raises(RuntimeError, match="nothing is offloaded"):
        offloading.onload()


def test_storage_refilled_while_offloaded_is_refused() -> None:
    training = Training()
    offloading = offloader(training, frozenset({"optimizer"}))
    offloading.offload()
    training.main.untyped_storage().resize_(30 * 30 * 4)
    with pytest.raises(RuntimeError, match=r"storage of main \(optimizer\) holds 3600 bytes"):
        offloading.onload()


def test_use_of_offloaded_tensor_raises() -> None:
    training = Training()
    offloading = offloader(training, frozenset({"parameters"}))
    offloading.offload()
    with pytest.raises(RuntimeError, match="data is not allocated"):
        training.weight.float()
    offloading.onload()


class Quantised(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(4).as_subclass(Quantised), "odd is a Quantised, expected a plain tensor"),
        (torch.from_numpy(torch.ones(4).numpy().copy()), "memory of odd cannot be freed"),
    ],
)
def test_tensor_without_plain_storage_is_refused_first(tensor: torch.Tensor, message: str) -> None:
    fine = torch.ones(8)
    tensors = {"parameters": [("fine", fine), ("odd", tensor)], "optimizer": [], "gradients": []}
    offloading = Offloader(lambda: tensors, ALL, device=CPU)
    with pytest.raises(RuntimeError, match=message):
        offloading.offload()
    assert not offloading.offloaded and (fine == 1).all()


def test_host_buffer_covers_range_across_chunks_once() -> None:
    buffer = HostBuffer(pinned=False, chunk_bytes=64)
    buffer.reserve(150)
    assert buffer.num_bytes == 150
    buffer.reserve(100)
    assert buffer.num_bytes == 150
    buffer.reserve(200)  # more chunks, the old ones stay
    whole = torch.cat(list(buffer.pieces(0, 200)))
    assert len(whole) == 200
    for number, piece in enumerate(buffer.pieces(60, 100)):
        piece.fill_(number + 1)
    assert [len(piece) for piece in buffer.pieces(60, 100)] == [4, 64, 22, 10]
    assert list(buffer.pieces(150, 0)) == []


REGISTERED, CAPTURED = {"nccl_ub": True}, {"cuda_graph_impl": "local"}


@pytest.mark.parametrize(
    ("text", "values", "has_cuda", "expected"),
    [
        ("auto", {}, True, {"gradients", "optimizer"}),
        ("auto", {}, False, set()),
        ("auto", REGISTERED, True, {"optimizer"}),
        ("auto", CAPTURED, True, set()),
        ("none", {}, True, set()),
        ("parameters, gradients", {"cuda_graph_impl": "none"}, False, {"parameters", "gradients"}),
        ("params,grads", {}, False, {"parameters", "gradients"}),
        ("grads, optimizer,params", {}, True, ALL),
        ("optimizer", REGISTERED, True, {"optimizer"}),
    ],
)
def test_offload_flag_names_kinds(
    text: str, values: dict, has_cuda: bool, expected: set[str]
) -> None:
    assert offload_kinds(text, values, has_cuda=has_cuda) == expected


@pytest.mark.parametrize(
    ("texts", "values", "says"),
    [
        (
            ["weights", "gradients,", "", "none,gradients", "param", "grads,auto"],
            {},
            "gradients, optimizer, parameters",
        ),
        (["gradients", "grads", "params,optimizer"], REGISTERED, "does not go with --use-nccl-ub"),
        (["optimizer"], CAPTURED, "--cuda-graph-impl, which captures the addresses"),
    ],
)
def test_invalid_offload_flag_is_refused(texts: list[str], values: dict, says: str) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=f"--rl-offload {text}.*{says}"):
            offload_kinds(text, values, has_cuda=True)


def test_host_chunks_are_freed_while_the_rest_is_read() -> None:
    """Without a GPU the host would hold all of training's state twice for a moment."""
    buffer = HostBuffer(pinned=False, chunk_bytes=64)
    buffer.reserve(160)
    chunks = [piece for piece in buffer.pieces(0, 160)]
    chunks[1].fill_(7)

    def held() -> list[int]:
        return [chunk.untyped_storage().nbytes() for chunk in chunks]

    buffer.release_before(63)
    assert held() == [64, 64, 32]
    buffer.release_before(100)
    assert held() == [0, 64, 32] and (chunks[1] == 7).all()
    buffer.release_before(160)
    assert held() == [0, 0, 0]


def test_everything_is_offloaded_for_start_of_engine() -> None:
    training = Training()
    before = training.copies()
    for what in (frozenset[str](), frozenset({"optimizer"}), ALL):
        offloading = offloader(training, what)
        with offloading.all_offloaded():
            assert offloading.offloaded == ALL
            assert not any(v.untyped_storage().nbytes() for v in training.views().values())
        assert not offloading.offloaded and offloading.host_bytes == 0
        assert_equal_but_gradients(training, before)


def test_tensor_that_cannot_leave_for_start_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    odd = torch.from_numpy(torch.ones(4).numpy().copy())
    fine = torch.ones(8)
    tensors = {"parameters": [("fine", fine), ("odd", odd)], "optimizer": [], "gradients": []}
    offloading = Offloader(lambda: tensors, frozenset(), device=CPU)
    with caplog.at_level("DEBUG"), offloading.all_offloaded():
        assert fine.untyped_storage().nbytes() == 0
        assert (odd == 1).all()
    assert (fine == 1).all()
    assert "0.0 GB cannot leave: odd" in caplog.text
    registered = Offloader(
        lambda: tensors, frozenset(), device=CPU, at_start=kinds_at_start({"nccl_ub": True})
    )
    with registered.all_offloaded():
        assert (fine == 1).all()


def test_failed_start_of_engine_restores_everything() -> None:
    training = Training()
    before = training.copies()
    offloading = offloader(training)
    with pytest.raises(ValueError, match="free memory"):
        with offloading.all_offloaded():
            raise ValueError("free memory is less than desired")
    assert_equal_but_gradients(training, before)
    with pytest.raises(ValueError, match="free memory"):
        with offloading.all_offloaded():
            training.main.untyped_storage().resize_(30 * 30 * 4)  # so that it cannot
            raise ValueError("free memory is less than desired")
    offloading = offloader(Training())
    offloading.offload("optimizer")
    with pytest.raises(RuntimeError, match="optimizer are offloaded already"):
        with offloading.all_offloaded():
            pass


def test_kinds_at_start_exclude_registered_memory() -> None:
    assert kinds_at_start({}) == ALL
    # Captured with the first update, which comes later.
    assert kinds_at_start({"cuda_graph_impl": "local", "optimizer_cuda_graph": True}) == ALL
    assert kinds_at_start({"fp8_param_gather": True}) == {"gradients", "optimizer"}
    assert kinds_at_start({"nccl_ub": True, "cuda_graph_impl": "local"}) == {"optimizer"}


def test_host_copies_of_hybrid_optimizer_are_found() -> None:
    """Even before its first step, when no state refers to them. It makes no step on CPU."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    weight = torch.nn.Parameter(torch.ones(30, dtype=torch.bfloat16))
    hybrid = HybridDeviceOptimizer(
        [weight],
        offload_fraction=0.5,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )
    (copy,) = hybrid.param_to_fp32_param.values()
    copy.grad = torch.ones(30)
    optimizer = SimpleNamespace(optimizer=hybrid, is_stub_optimizer=False)
    found = megatron_adapter.train_tensors(megatron_adapter.TrainState([], optimizer, None, 0))
    assert any(tensor is copy for _, tensor in found["optimizer"])
    assert any(tensor is copy.grad for _, tensor in found["gradients"])
