"""The emulated device answers what Megatron asks, consistently with itself."""

import time

import pytest
import torch

from megatron_switch.emulation import cuda_on_cpu


@pytest.fixture(autouse=True)
def _emulation(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with cuda_on_cpu():
        yield


def test_torch_is_told_that_there_is_no_gpu():
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()


def test_every_rank_of_the_host_finds_a_device():
    assert torch.cuda.device_count() == len(torch.cuda.default_generators) == 4
    torch.cuda.set_device("cuda:3")
    assert torch.cuda.current_device() == 3
    torch.cuda.set_device(torch.device("cuda"))  # no index: stay
    assert torch.cuda.current_device() == 3


def test_a_device_block_changes_the_current_device_and_back():
    with torch.cuda.device(2):
        assert torch.cuda.current_device() == 2
        with torch.cuda.device("cuda:1"):
            assert torch.cuda.current_device() == 1
        with torch.cuda.device(None):
            assert torch.cuda.current_device() == 2
    assert torch.cuda.current_device() == 0


def test_the_device_supports_bfloat16_and_has_memory():
    properties = torch.cuda.get_device_properties(0)
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (8, 0)
    assert properties.name == torch.cuda.get_device_name()
    assert properties.total_memory > 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total


def test_memory_is_that_of_the_process():
    before = torch.cuda.memory_allocated()
    ballast = torch.ones(32, 2**20, dtype=torch.uint8)
    assert torch.cuda.memory_allocated() - before > ballast.numel() / 2
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() - 2**20
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] > 0
    assert stats["num_ooms"] == 0


def test_a_stream_is_current_inside_of_its_context_which_can_be_entered_again():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    default, context = torch.cuda.current_stream(), torch.cuda.stream(first)
    for _ in range(2):
        with context:
            assert torch.cuda.current_stream() is first
            with torch.cuda.stream(second), context:
                assert torch.cuda.current_stream() is first
            assert torch.cuda.current_stream() is first
            with torch.cuda.stream(None):
                assert torch.cuda.current_stream() is first
        assert torch.cuda.current_stream() is default


def test_streams_and_events_do_everything_at_once():
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        value = torch.ones(2, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(stream)
    event = stream.record_event()
    event.wait()
    event.synchronize()
    value.record_stream(stream)
    torch.cuda.synchronize()
    assert event.query()
    assert stream.query()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.Stream.priority_range() == (0, 0)


def test_events_measure_milliseconds():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.02)
    end.record()
    assert 20 <= start.elapsed_time(end) < 20_000


def test_what_only_a_gpu_can_do_still_fails():
    with pytest.raises(Exception, match=r"CUDA|dummy"):
        torch.cuda.CUDAGraph()
