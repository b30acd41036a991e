"""Seeded bugs of CUDA code, which tests on fake devices have to find.

`python -m tests.adversary.cuda_mutants` puts each bug into a temporary copy of the package and runs
the test that has to find it. `cuda_mutants.md` records what the test said.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.adversary.mutants import ROOT, Mutant, bug_of, rows_of

TABLE = Path(__file__).with_name("cuda_mutants.md")
SCHEDULES = 60
PYTEST = (
    *("pytest", "-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", "-m", "gpu"),
    *("-q", "-x", "--tb=short", "--show-capture=no"),
)
# What a copy needs besides package and tests: settings, what tests import, the built fake device.
SHARED = ("pyproject.toml", "benchmarks", "build")

# What the output of a test says about a bug, by a pattern; the first one that is found counts.
MESSAGES = {
    r"OrderError: .*?, (.*); a stream does not wait": r"another order of operations: \1",
    r"OrderError: .*?, (\w+::\w+ raised .*)": r"another order of operations: \1",
    r"(cannot convert float NaN to integer)": "a wrong value",
    r"called a (synchronizing CUDA operation: [\w ]+)": r"\1",
    r"(the host waited: \{'.*\})": r"\1",
    r"distmp.errors.\w+Error: (.*?)(?:;|$)": r"\1",
    r"(copied from memory that is not pinned)": r"\1",
    r"(pinned memory was written before it had been copied to the device)": r"\1",
    r"(has \d+ launches, and \d+ in the budget)": r"\1",
    r"(the \w+ matrix must be \w+-major)": r"\1",
    r"^E? *(?:AssertionError|assert |Tensor-likes are not)": "a wrong value",
}
# Numbers of operations, which differ between runs.
OPERATION = re.compile(r" \(operation \d+(?:, stream -?\d+)?\)")

# The tests. Most bugs are races: the test fails in an order of operations that only a replay runs.
GRADIENTS = (
    "tests/buckets/test_gradients.py::"
    "test_gradients_of_two_gpus_are_summed_while_backward_continues"
)
IN_FP32, IN_BF16 = f"{GRADIENTS}[torch.float32]", f"{GRADIENTS}[torch.bfloat16]"
REDUCTIONS = "tests/buckets/test_reduction.py::test_every_kind_on_two_ranks_with_gpus"
TWO_HOPS = "tests/buckets/test_exchange.py::test_two_machines_with_gpus"
STREAMS = "tests/engine/test_engine_streams.py"
GIVEN = f"{STREAMS}::test_step_inputs_need_no_synchronization[fp16]"
TWO_RANKS = f"{STREAMS}::test_two_ranks_synchronize_streams"
SNAPSHOT = "tests/checkpoint/test_host_buffers.py::test_gpu_snapshot_holds_state_of_its_step"
HOST_COPY = "tests/utils/test_host_copy.py::test_gpu_values_are_read_after_arrival"
BUFFERS = "tests/parallel/test_module_buffers.py::"
REVERTED = f"{BUFFERS}test_a_gpu_reverts_a_skipped_step_without_waiting"
BROADCAST = f"{BUFFERS}test_gpus_have_the_batch_statistics_of_rank_0"
OWNERS = "tests/optim/test_owners.py::test_two_gpus_exchange_matrices"
RATES = "tests/optim/test_learning_rates.py::test_gpu_rates_need_no_synchronization"
TIMES = "tests/telemetry/test_stragglers.py::test_two_gpus_exchange_times_without_synchronization"
BUSY = "tests/telemetry/test_stragglers.py::test_device_times_are_read_without_synchronization"
MOVED = "tests/engine/test_microbatches.py::test_pinned_batches_are_moved_without_waiting"
LAUNCHES = (
    "tests/scaling/test_step_decision.py::test_a_gpu_launches_as_much_for_many_gradients_as_for_few"
)
SCALER = "tests/scaling/test_grad_scaler.py::"
ONE_SCALER = f"{SCALER}test_on_a_gpu_the_bits_of_torch_without_its_waiting[False]"
TWO_SCALERS = f"{SCALER}test_two_gpus_skip_together"

OF_FP8 = f"{STREAMS}::test_fp8_matmuls_synchronize_streams"
OUTCOME = "tests/engine/test_outcome.py::test_making_an_outcome_does_not_wait_for_the_device"
AVERAGE = "tests/engine/test_average.py::test_average_needs_no_synchronization[fp16]"
SAVED = "tests/checkpoint/test_writer.py::test_gpu_state_is_copied_during_training"
BUDGET = "tests/engine/test_launches.py::test_launches_equal_the_recorded_budget"
PREDICTED = "tests/benchmarks/test_predicted_step.py::"
IN_TRAINING = "tests/training/test_host_waits.py::"
EACH_STEP = f"{IN_TRAINING}test_steps_wait_only_for_the_step_before"

REDUCTION = "distmp/buckets/reduction.py"
EXCHANGE = "distmp/buckets/reduction.py"
GRADIENT_BUCKETS = "distmp/buckets/gradients.py"
PARAMETERS = "distmp/buckets/parameters.py"
STEP = "distmp/engine/step.py"
UPDATES = "distmp/engine/updates.py"
SNAPSHOTS = "distmp/checkpoint/snapshot.py"
COPIES = "distmp/utils/host_copy.py"
MODULE_BUFFERS = "distmp/parallel/module_buffers.py"
STRAGGLERS = "distmp/training/callbacks/stragglers.py"
LEARNING_RATES = "distmp/optim/learning_rates.py"
PRODUCTS = "distmp/quantization/products.py"
TRAINER = "distmp/training/trainer.py"
# Runs the following statement on a stream that waits for nothing.
ELSEWHERE = "with torch.cuda.stream(torch.cuda.Stream()):"

MUTANTS = [
    Mutant(
        "the side stream of a reduction does not wait for the gradients",
        REDUCTION,
        "self._stream.wait_stream(torch.cuda.current_stream(device))",
        "pass",
        IN_BF16,
    ),
    Mutant(
        "nobody waits for the side stream of a reduction",
        REDUCTION,
        "torch.cuda.current_stream(self._device).wait_stream(self._stream)",
        "pass",
        IN_BF16,
    ),
    Mutant(
        "the side stream waits for the current one, instead of the other way round",
        REDUCTION,
        "torch.cuda.current_stream(self._device).wait_stream(self._stream)",
        "self._stream.wait_stream(torch.cuda.current_stream(self._device))",
        REDUCTIONS,
    ),
    Mutant(
        "the buffers of an exchange belong to the stream of backward",
        REDUCTION,
        "        with self._side_stream(self._device):\n"
        "            exchange = Exchange(bucket, self._groups, self.comm_dtype, "
        "pairwise=self._pairwise)\n",
        "        exchange = Exchange(bucket, self._groups, self.comm_dtype, "
        "pairwise=self._pairwise)\n"
        "        with self._side_stream(self._device):\n",
        IN_BF16,
    ),
    Mutant(
        "an all-reduce is not waited for",
        REDUCTION,
        "for work in self._pending:\n            work.wait()",
        "for work in self._pending:\n            pass",
        IN_FP32,
    ),
    Mutant(
        "the gathered sums are not waited for",
        REDUCTION,
        "self._gathers.pop(0)\n            work.wait()",
        "self._gathers.pop(0)",
        IN_BF16,
    ),
    Mutant(
        "what an exchange receives is not waited for",
        EXCHANGE,
        "self._work.wait()",
        "pass",
        REDUCTIONS,
    ),
    Mutant(
        "what the second hop of an exchange receives is not waited for",
        EXCHANGE,
        "self._work.wait()",
        "_ = len(self._groups) > 1 and self._work.wait()",
        TWO_HOPS,
    ),
    Mutant(
        "what an exchange sends is freed while it is being sent",
        EXCHANGE,
        "self._work = all_to_all(self._received, self._sent, self._groups[0])",
        "self._work = all_to_all(self._received, self._sent, self._groups[0])\n"
        "        self._sent.untyped_storage().resize_(0)",
        IN_BF16,
    ),
    Mutant(
        "a reduction starts before the last gradient of its bucket is there",
        GRADIENT_BUCKETS,
        "        if gradient.layout is not torch.strided:",
        "        if self._reduces:\n"
        "            self._mark_ready(slot)\n"
        "        if gradient.layout is not torch.strided:",
        IN_FP32,
    ),
    Mutant(
        "an absent gradient is zeroed while its bucket is being reduced",
        GRADIENT_BUCKETS,
        "self._reduction.launch(total)",
        "self._reduction.launch(total)\n            self._zero_missing(bucket)",
        IN_FP32,
    ),
    Mutant(
        "buckets are zeroed before their reductions have finished",
        GRADIENT_BUCKETS,
        "            self._launch_up_to(len(self.layouts))\n",
        "            self._launch_up_to(len(self.layouts))\n"
        "            torch._foreach_zero_(self._leaf.buffers)\n",
        IN_FP32,
    ),
    Mutant(
        "gradients are given to the optimizer before the reductions have finished",
        GRADIENT_BUCKETS,
        "if self._reduction is not None:\n                self._reduction.finish()",
        "if self._reduction is not None and self._observed is not None:\n"
        "                self._reduction.finish()",
        f"{TWO_RANKS}[ddp]",
    ),
    Mutant(
        "the host reads in every step whether the last one was skipped",
        "distmp/buckets/used_parameters.py",
        "if self._newly_used and (self._skipped is None or not on_host(self._skipped)):",
        "if self._skipped is None or not on_host(self._skipped):",
        GIVEN,
    ),
    Mutant(
        "updated parameters are not waited for",
        PARAMETERS,
        "for work in pending:\n            work.wait()",
        "for work in pending:\n            pass",
        f"{TWO_RANKS}[sharded optimizer]",
    ),
    Mutant(
        "updated parameters are rounded on another stream",
        PARAMETERS,
        "                flat.own.copy_(flat.updated)\n",
        "                with torch.cuda.stream(torch.cuda.Stream()):\n"
        "                    flat.own.copy_(flat.updated)\n",
        f"{TWO_RANKS}[sharded optimizer]",
    ),
    Mutant(
        "the reduce-scatter of FSDP is not waited for",
        "distmp/parallel/fsdp_collectives.py",
        "collectives.reduce_scatter_on_stream(output_tensor, input_tensor, *self._groups)",
        "dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, async_op=True)",
        f"{TWO_RANKS}[fsdp]",
    ),
    Mutant(
        "the all-gather of FSDP is not waited for",
        "distmp/parallel/fsdp_collectives.py",
        "collectives.all_gather_on_stream(output_tensor, input_tensor, group)",
        "collectives.all_gather(output_tensor, input_tensor, group)",
        f"{TWO_RANKS}[fsdp]",
    ),
    Mutant(
        "the input of FSDP's reduce-scatter is freed while it is being read",
        "distmp/parallel/fsdp_collectives.py",
        'if input_tensor.device.type == "cpu":\n            # FSDP keeps',
        "if input_tensor.numel():\n            # FSDP keeps",
        f"{TWO_RANKS}[fsdp]",
    ),
    Mutant(
        "the reduce-scatter of FSDP runs on another stream",
        "distmp/parallel/fsdp_collectives.py",
        "            while not exchange.advance(output_tensor):\n                pass\n",
        "            with torch.cuda.stream(torch.cuda.Stream()):\n"
        "                while not exchange.advance(output_tensor):\n"
        "                    pass\n",
        f"{TWO_RANKS}[fsdp, reduced in 16 bits]",
    ),
    Mutant(
        "the exchanged matrices are not waited for",
        "distmp/optim/owners.py",
        "all_to_all(received, values, self._group, expected, sent).wait()",
        "self.last = all_to_all(received, values, self._group, expected, sent)",
        OWNERS,
    ),
    Mutant(
        "matrices are exchanged on another stream",
        "distmp/optim/owners.py",
        "        all_to_all(received, values, self._group, expected, sent).wait()\n",
        "        with torch.cuda.stream(torch.cuda.Stream()):\n"
        "            all_to_all(received, values, self._group, expected, sent).wait()\n",
        OWNERS,
    ),
    Mutant(
        "buffers of rank 0 are not waited for",
        MODULE_BUFFERS,
        "dist.get_global_rank(self._group, 0), self._group)",
        "dist.get_global_rank(self._group, 0), self._group, async_op=True)",
        BROADCAST,
    ),
    Mutant(
        "buffers are saved on another stream",
        MODULE_BUFFERS,
        "        self._before = values_of_all_engines(self.batches)\n",
        "        with torch.cuda.stream(torch.cuda.Stream()):\n"
        "            self._before = values_of_all_engines(self.batches)\n",
        REVERTED,
    ),
    Mutant(
        "buffers are restored on another stream",
        MODULE_BUFFERS,
        "            values.revert(skipped)\n",
        "            with torch.cuda.stream(torch.cuda.Stream()):\n"
        "                values.revert(skipped)\n",
        REVERTED,
    ),
    Mutant(
        "the host decides whether buffers are reverted",
        MODULE_BUFFERS,
        "values = torch.where(condition.to(now.device, torch.bool), *both)",
        "values = both[0] if condition else both[1]",
        REVERTED,
    ),
    Mutant(
        "the decision of a scaler is not waited for",
        "distmp/scaling/rank_group.py",
        "dist.all_reduce(reduced, group=group)\n    return",
        "dist.all_reduce(reduced, group=group, async_op=True)\n    return",
        TWO_SCALERS,
    ),
    Mutant(
        "the scaler reads found_inf on the host",
        "distmp/scaling/grad_scaler.py",
        "if starts_momentum and found_inf.item():",
        "if found_inf.item():",
        ONE_SCALER,
    ),
    Mutant(
        "a scaler reads numbers on the host before they have arrived",
        COPIES,
        'non_blocking=device.type != "cpu"',
        "non_blocking=True",
        f"{SCALER}test_a_scale_on_the_host_waits_for_gradients_of_a_gpu",
    ),
    Mutant(
        "the decision of a step is not waited for",
        "distmp/scaling/step_decision.py",
        "dist.all_reduce(stats, group=group)",
        "dist.all_reduce(stats, group=group, async_op=True)",
        f"{TWO_RANKS}[ddp]",
    ),
    Mutant(
        "a wait for a collective that is measured does not happen",
        "distmp/distributed/wait_times.py",
        "done: Any = self._work.wait(*timeout)",
        "done: Any = self._work.is_completed()",
        f"{TWO_RANKS}[ddp]",
    ),
    Mutant(
        "times are read before the device has reached them",
        "distmp/distributed/wait_times.py",
        "return self._event is None or self._event.query()",
        "return True",
        BUSY,
    ),
    Mutant(
        "times are those of another stream",
        "distmp/distributed/wait_times.py",
        "self._event.record(torch.cuda.current_stream(device))",
        "self._event.record(torch.cuda.Stream(device))",
        BUSY,
    ),
    Mutant(
        "found_inf is read before the update",
        UPDATES,
        "if self.skips_on_device:\n            if self.max_applied == 0",
        "if self.skips_on_device and not decision.found_inf:\n            if self.max_applied == 0",
        GIVEN,
    ),
    Mutant(
        "the nominal weight is agreed on in every step",
        STEP,
        "if state.nominal_weight is None:\n        state.nominal_weight",
        "if state.nominal_weight or True:\n        state.nominal_weight",
        GIVEN,
    ),
    Mutant(
        "a step waits for the device",
        STEP,
        "current_phase.enter(UPDATE)",
        "torch.cuda.synchronize()",
        GIVEN,
    ),
    Mutant(
        "a weight on the host is copied while the host waits",
        STEP,
        "weight = to_device(weight.detach(), setup.device, copy=True)",
        "weight = weight.detach().to(setup.device, copy=True)",
        GIVEN,
    ),
    Mutant(
        "a number is copied to the device while the host waits",
        "distmp/scaling/step_decision.py",
        "return numbers_to_device(numbers, torch.float64, device)",
        "return torch.tensor(numbers, dtype=torch.float64, device=device)",
        GIVEN,
    ),
    Mutant(
        "a batch is copied while the host waits",
        COPIES,
        'non_blocking=device.type != "cpu"',
        "non_blocking=False",
        MOVED,
    ),
    Mutant(
        "a batch is read on the host before it has arrived",
        COPIES,
        'non_blocking=device.type != "cpu"',
        "non_blocking=True",
        MOVED,
    ),
    Mutant(
        "a kernel is launched for every gradient",
        "distmp/scaling/norms.py",
        "torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))",
        "torch.stack([tensor.norm(dtype=torch.float64) for tensor in tensors])",
        LAUNCHES,
    ),
    Mutant(
        "a table of learning rates is copied from memory that is not pinned",
        COPIES,
        "tensor = tensor.pin_memory()",
        "pass",
        RATES,
    ),
    Mutant(
        "a table of learning rates is copied while the host waits",
        COPIES,
        "return tensor.to(device, non_blocking=True)",
        "return tensor.to(device)",
        RATES,
    ),
    Mutant(
        "the host looks up the learning rate",
        LEARNING_RATES,
        "rates = self._table.index_select(0, applied.reshape(1))[0]",
        "rates = self._table[applied.item()]",
        RATES,
    ),
    Mutant(
        "pinned learning rates are changed before they are copied",
        COPIES,
        "return tensor.to(device, non_blocking=True)",
        "on_device = tensor.to(device, non_blocking=True)\n"
        "    tensor.zero_()\n"
        "    return on_device",
        RATES,
    ),
    Mutant(
        "the times of other ranks are not waited for",
        STRAGGLERS,
        "all_gather(gathered, numbers, world.group).wait()",
        "all_gather(gathered, numbers, world.group)",
        TIMES,
    ),
    Mutant(
        "the times of this rank are copied from memory that is not pinned",
        STRAGGLERS,
        "numbers_to_device(own or (math.nan, math.nan), torch.float64, world.device)",
        "torch.tensor(own or (math.nan, math.nan), dtype=torch.float64).to(world.device)",
        TIMES,
    ),
    Mutant(
        "a copy to the host is read at once",
        COPIES,
        "self._copied.synchronize()",
        "pass",
        HOST_COPY,
    ),
    Mutant(
        "the host waits for a copy of numbers",
        COPIES,
        'values.to("cpu", non_blocking=True)',
        'values.to("cpu")',
        HOST_COPY,
    ),
    Mutant(
        "the event of a copy to the host is recorded before it",
        COPIES,
        '        self._values = values.to("cpu", non_blocking=True)\n'
        "        self._copied = torch.cuda.Event() if values.is_cuda else None\n"
        "        if self._copied is not None:\n"
        "            self._copied.record(torch.cuda.current_stream(values.device))\n",
        "        self._copied = torch.cuda.Event() if values.is_cuda else None\n"
        "        if self._copied is not None:\n"
        "            self._copied.record(torch.cuda.current_stream(values.device))\n"
        '        self._values = values.to("cpu", non_blocking=True)\n',
        HOST_COPY,
    ),
    Mutant(
        "the event of a copy to the host is recorded on another stream",
        COPIES,
        "self._copied.record(torch.cuda.current_stream(values.device))",
        "self._copied.record(torch.cuda.Stream(values.device))",
        HOST_COPY,
    ),
    Mutant(
        "a snapshot does not wait for the update before it",
        SNAPSHOTS,
        "stream.wait_stream(torch.cuda.current_stream(device))",
        "pass",
        SNAPSHOT,
    ),
    Mutant(
        "the update does not wait for a snapshot",
        SNAPSHOTS,
        "torch.cuda.current_stream(self._device).wait_event(self._event)",
        "pass",
        SNAPSHOT,
    ),
    Mutant(
        "a snapshot is written before it has arrived",
        SNAPSHOTS,
        "self._event.synchronize()",
        "pass",
        SNAPSHOT,
    ),
    Mutant(
        "the event of a snapshot is recorded on another stream",
        SNAPSHOTS,
        "return stream.record_event()",
        "return torch.cuda.default_stream(device).record_event()",
        SNAPSHOT,
    ),
    Mutant(
        "the event of a snapshot is recorded before its copies",
        SNAPSHOTS,
        "    with torch.cuda.stream(stream):\n",
        "    event = stream.record_event()\n"
        "    stream.record_event = lambda: event\n"
        "    with torch.cuda.stream(stream):\n",
        SNAPSHOT,
    ),
    Mutant(
        "a snapshot is copied to memory that is not pinned",
        "distmp/checkpoint/snapshot.py",
        "dtype=dtype, pin_memory=True)",
        "dtype=dtype)",
        SNAPSHOT,
    ),
    Mutant(
        "the host waits for the tensors of a snapshot that may change at any time",
        SNAPSHOTS,
        "copy_(self.source, non_blocking=self.is_asynchronous)",
        "copy_(self.source)",
        SNAPSHOT,
    ),
    Mutant(
        "the tensors of a snapshot that may change at any time are not copied before",
        SNAPSHOTS,
        "if name in held:",
        "if name:",
        SNAPSHOT,
    ),
    Mutant(
        "batches are copied on a stream that nobody waits for",
        "distmp/utils/host_copy.py",
        "    return map_tensors(partial(to_device, device=device), batch)",
        f"    {ELSEWHERE}\n        return map_tensors(partial(to_device, device=device), batch)",
        GIVEN,
    ),
    Mutant(
        "batches of a copy stream have no record_stream",
        "distmp/utils/host_copy.py",
        "    return map_tensors(partial(to_device, device=device), batch)",
        '    stream = vars(torch.cuda).setdefault("_copies", torch.cuda.Stream())\n'
        "    with torch.cuda.stream(stream):\n"
        "        copied = map_tensors(partial(to_device, device=device), batch)\n"
        "    torch.cuda.current_stream().wait_stream(stream)\n"
        "    return copied",
        GIVEN,
    ),
    Mutant(
        "the weight of a microbatch is copied on another stream",
        "distmp/engine/step.py",
        "        weight = to_device(weight.detach(), setup.device, copy=True)",
        f"        {ELSEWHERE}\n            weight = to_device(weight.detach(), setup.device) + 0",
        GIVEN,
    ),
    Mutant(
        "the numbers of a step are copied on another stream",
        "distmp/engine/outcome.py",
        "        self._copy = HostCopy(torch.cat(flat))",
        f"        {ELSEWHERE}\n            self._copy = HostCopy(torch.cat(flat))",
        GIVEN,
    ),
    Mutant(
        "the host waits for the numbers of a step when it launches it",
        "distmp/engine/outcome.py",
        "        self._copy = HostCopy(torch.cat(flat))",
        "        self._copy = HostCopy(torch.cat(flat).cpu())",
        GIVEN,
    ),
    Mutant(
        "steps are counted on another stream",
        STEP,
        "    torch.addcmul(added, state.counts, kept, out=state.counts)\n",
        f"    {ELSEWHERE}\n        torch.addcmul(added, state.counts, kept, out=state.counts)\n",
        GIVEN,
    ),
    Mutant(
        "the loss scale is updated on another stream",
        STEP,
        "        exhausted = state.loss_scale.update(",
        f"        {ELSEWHERE}\n            exhausted = state.loss_scale.update(",
        GIVEN,
    ),
    Mutant(
        "the host reads the number of updates in every step",
        STEP,
        "updates.learning_rates.set(state.counts[0], updates.max_applied)",
        "updates.learning_rates.set(state.counts[0] + 0 * state.counts[0].item(), "
        "updates.max_applied)",
        GIVEN,
    ),
    Mutant(
        "the optimizer steps on a stream that does not wait for the decision",
        UPDATES,
        "            self._strategy.prepare_optimizer_grads()\n            self.tensors.step()\n",
        "            self._strategy.prepare_optimizer_grads()\n"
        f"            {ELSEWHERE}\n                self.tensors.step()\n",
        GIVEN,
    ),
    Mutant(
        "gradients are divided twice: by the engine, and by the fused optimizer",
        UPDATES,
        "            self._strategy.prepare_optimizer_grads()\n            self.tensors.step()\n",
        "            for part in self._strategy.gradients():\n"
        "                torch._foreach_div_(part.tensors, decision.grad_scale)\n"
        "            self._strategy.prepare_optimizer_grads()\n            self.tensors.step()\n",
        f"{BUDGET}[ddp-fp16]",
    ),
    Mutant(
        "a cast is launched for every parameter",
        PARAMETERS,
        "                flat.own.copy_(flat.updated)\n",
        "                for own, updated in zip(flat.own.chunk(4), flat.updated.chunk(4)):\n"
        "                    own.copy_(updated)\n",
        f"{BUDGET}[ddp-bf16]",
    ),
    Mutant(
        "the average of the weights is updated on another stream",
        "distmp/engine/average.py",
        "            average.lerp_(",
        f"            {ELSEWHERE[:-1]}, torch.no_grad():\n                average.lerp_(",
        AVERAGE,
    ),
    Mutant(
        "the host reads whether the average is updated",
        "distmp/engine/average.py",
        "share.to(average.device))",
        "share.item())",
        AVERAGE,
    ),
    Mutant(
        "the second operand of an FP8 kernel is row-major",
        PRODUCTS,
        "b.values.to(b.number_format.dtype).contiguous().t(),",
        "b.values.to(b.number_format.dtype).t().contiguous(),",
        OF_FP8,
    ),
    Mutant(
        "the scale of an FP8 operand is computed on another stream",
        "distmp/quantization/linear.py",
        "        inputs = quantize(x, formats.operand, formats.scaling, "
        "counts=_row(counts, INPUT))\n",
        f"        {ELSEWHERE}\n"
        "            inputs = quantize(x, formats.operand, formats.scaling, "
        "counts=_row(counts, INPUT))\n",
        OF_FP8,
    ),
    Mutant(
        "an FP8 matmul runs on another stream",
        "distmp/quantization/linear.py",
        "        return (state.product(inputs, weights, torch.float32) + bias).to(x.dtype)\n",
        f"        {ELSEWHERE}\n"
        "            return (state.product(inputs, weights, torch.float32) + bias).to(x.dtype)\n",
        OF_FP8,
    ),
    Mutant(
        "an all-gather of FSDP waits for all kernels, and so is exposed",
        "distmp/parallel/fsdp_collectives.py",
        "        collectives.all_gather_on_stream(output_tensor, input_tensor, group)\n",
        "        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())\n"
        "        collectives.all_gather_on_stream(output_tensor, input_tensor, group)\n",
        f"{PREDICTED}test_step_is_faster_than_fsdp2_by_hand_and_exposes_less_communication",
    ),
    Mutant(
        "a reduce-scatter of FSDP blocks the stream of backward",
        "distmp/parallel/fsdp_collectives.py",
        "output_tensor, input_tensor, *self._groups)\n",
        "output_tensor, input_tensor, *self._groups)\n"
        "            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())\n",
        f"{PREDICTED}test_step_is_faster_than_fsdp2_by_hand_and_exposes_less_communication",
    ),
    Mutant(
        "reductions of DDP start after backward",
        GRADIENT_BUCKETS,
        "                self._reduction.launch(total)\n",
        "                self._late = [*vars(self).get('_late', ()), total]\n"
        "                if len(self._late) == len(self._order):\n"
        "                    for late in vars(self).pop('_late'):\n"
        "                        self._reduction.launch(late)\n",
        f"{PREDICTED}test_ddp_hides_its_reductions",
    ),
    Mutant(
        "gradients of FSDP are copied in FP32",
        "distmp/parallel/fsdp.py",
        "        return fsdp_internals.unconverted_gradients(self._sixteen_bit, loss)",
        "        return super().backward_context(loss)",
        f"{PREDICTED}test_memory_traffic_is_at_most_that_of_fsdp2_by_hand",
    ),
    Mutant(
        "batches of a run are not pinned",
        "distmp/data/loading.py",
        'pin_memory=world is not None and world.device.type == "cuda",',
        "pin_memory=False,",
        EACH_STEP,
    ),
    Mutant(
        "the log waits for the device in every step",
        "distmp/training/callbacks/step_logger.py",
        "        record = self._record(result, trainer)\n",
        "        trainer.engine.step_counts.tolist()\n"
        "        record = self._record(result, trainer)\n",
        EACH_STEP,
    ),
    Mutant(
        "the trainer reads the loss of the step that it has just launched",
        TRAINER,
        "                self.progress.step += 1\n",
        "                self.progress.step += 1\n                outcome.numbers  # noqa: B018\n",
        f"{IN_TRAINING}test_no_step_is_read_when_it_has_just_been_launched",
    ),
    Mutant(
        "a validation reads the loss of every microbatch",
        "distmp/engine/evaluation.py",
        "        self._microbatches += 1\n",
        "        self._microbatches += loss_sum.item() == loss_sum.item() or 1\n",
        f"{IN_TRAINING}test_validation_reads_once",
    ),
    Mutant(
        "a save copies each tensor while the host waits",
        "distmp/training/callbacks/checkpointing.py",
        "        trainer.read_step()\n        if trainer.rollback_from is None:\n",
        "        trainer.read_step()\n"
        "        for tensor in trainer.engine.state_dict().values():\n"
        "            tensor.cpu()\n"
        "        if trainer.rollback_from is None:\n",
        f"{IN_TRAINING}test_save_waits_for_no_tensor",
    ),
]


NOT_FOUND = "| not found |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversary.cuda_mutants")
    parser.add_argument("--only", default="", help="mutants whose bug has this text in it")
    parser.add_argument("--new", action="store_true", help="only mutants not found so far")
    parser.add_argument("--workers", type=int, default=2, help="how many to try at the same time")
    options = parser.parse_args()
    found = {bug_of(row) for row in rows_of(TABLE) if NOT_FOUND not in row}
    chosen = [
        mutant
        for mutant in MUTANTS
        if options.only in mutant.bug and not (options.new and mutant.bug in found)
    ]
    control = _run(sorted({mutant.finder for mutant in chosen}), ROOT)
    if control.returncode:
        sys.exit(f"a test fails without a bug: {control.stdout}")
    rows = []
    with ThreadPoolExecutor(options.workers) as pool:
        for row in pool.map(_row, chosen):
            print(row, flush=True)
            rows.append(row)
            TABLE.write_text(_table(rows))
    return int(any(NOT_FOUND in row for row in rows))


def _table(rows: list[str]) -> str:
    """Return the table with these rows, and with the existing ones of other mutants."""
    known = {bug_of(row): row for row in (*rows_of(TABLE), *rows)}
    ordered = [known[mutant.bug] for mutant in MUTANTS if mutant.bug in known]
    found = sum(NOT_FOUND not in row for row in ordered)
    return "\n".join(
        [
            "# Seeded bugs of CUDA code",
            "",
            f"{found} of {len(ordered)} were found by tests on fake devices, in {SCHEDULES} orders "
            "of their operations: `python -m tests.adversary.cuda_mutants`.",
            "",
            "| bug | file | found by | what the test said |",
            "|---|---|---|---|",
            *ordered,
            "",
        ]
    )


def _row(mutant: Mutant) -> str:
    with mutant.applied() as root:
        for name in SHARED:
            (root / name).symlink_to(ROOT / name)
        run = _run([mutant.finder], root)
    said = "not found | |"
    if run.returncode and (message := _message(run.stdout)):
        said = f"`{mutant.finder.split('::')[1]}` | {message} |"
    elif run.returncode:
        print(f"{mutant.bug}: the test failed for another reason\n{run.stdout}", flush=True)
    return f"| {mutant.bug} | `{mutant.file}` | {said}"


def _run(tests: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    """Run tests in the copy at `root`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "FAKE_CUDA_SCHEDULES": str(SCHEDULES),
    }
    # The processes of a test import the same modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", *PYTEST, *tests]
    run = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}: {run.stdout}\n{run.stderr}")
    return run


def _message(output: str) -> str | None:
    """Return what a test said about the bug; None if it failed for another reason."""
    for pattern, message in MESSAGES.items():
        if match := re.search(pattern, output, re.MULTILINE):
            return OPERATION.sub("", match.expand(message)).replace("|", "/")
    return None


if __name__ == "__main__":
    sys.exit(main())
