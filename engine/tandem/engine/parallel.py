"""The ranks of one worker as a group: sums, gathers and barriers over torch.distributed, gloo on CPU, NCCL on CUDA.

Owns its own backend objects and never touches torch.distributed's default group, so that other parts of the process
(a KV transport) may open groups of their own. It must not know about models. The ranks are always on one host: gloo
listens on loopback and needs no name resolution.

Calls come from one thread, the step loop, in the same order on all ranks; `abort` may come from any thread. Guarantees
when a rank is gone:

    gloo   a dead rank closes its connections: the others' pending call raises at once. A stopped rank stays silent:
                  the call raises after `timeout_s`, and also if another thread aborted its group meanwhile.
    NCCL   the watchdog of torch.distributed ends the collective, and the process, after `timeout_s`; `abort` at once.

A group that failed once is broken for good; every later call raises. Ranks that were given different steps never add
up unrelated numbers: the size of a message is in its gloo tag, and another size waits until the limit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tandem.core.errors import ConfigError, StartupError, WorkerLostError
from tandem.core.timeout_scale import patient

START_TIMEOUT_S = patient(120.0)
"""How long a rank waits for the others to start or to load their weights; a death shows at once even then."""
_PREFIX = "tandem-tp"
_LOOPBACK = "127.0.0.1"
_TAGS = 1 << 30
_DIRECT_BYTES = 32 << 10
"""Up to here every rank sends all it has to every other; above, pieces are summed by their owners and sent around."""


class TensorGroup(ABC):
    """The tensor-parallel ranks of one worker; this process is `rank` of `size`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, written over `tensor` (contiguous, same shape and dtype everywhere); returns it.

        All ranks get the same bits. On gloo numbers are added in the order of the ranks, in fp32: a number's sum does
        not depend on its place in the tensor. Raises WorkerLostError when a rank is gone.
        """

    @abstractmethod
    def gather_columns(self, part: Tensor) -> Tensor:
        """[rows, columns] of every rank side by side on rank 0: [rows, size · columns]; elsewhere [0, size · columns].

        `part` is contiguous and of one shape and dtype everywhere. Raises WorkerLostError when a rank is gone.
        """

    @abstractmethod
    def smallest(self, values: Sequence[int], *, timeout_s: float | None = None) -> tuple[int, ...]:
        """The minimum over the ranks, number by number; returns when every rank has called it.

        `timeout_s` None is the group's. Raises WorkerLostError when a rank is gone or late.
        """

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has come here; raises WorkerLostError when one is gone or late."""
        self.smallest((0,), timeout_s=timeout_s)

    @abstractmethod
    def abort(self, why: str) -> None:
        """Break the group for the reason `why`: later calls here raise, and the other ranks see the connection close.

        Any thread may call it, more than once; it does not wait.
        """

    @abstractmethod
    def close(self) -> None:
        """Give connections and threads back. No call may be pending. Calling it again does nothing."""


class SingleRank(TensorGroup):
    """A group of one: nothing to sum, nothing to wait for. Uses no torch.distributed."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_columns(self, part: Tensor) -> Tensor:
        return part

    def smallest(self, values: Sequence[int], *, timeout_s: float | None = None) -> tuple[int, ...]:
        return tuple(values)

    def abort(self, why: str) -> None:
        pass

    def close(self) -> None:
        pass


def open_group(
    rank: int, size: int, *, device: torch.device | str, rendezvous: Path, timeout_s: float,
    start_timeout_s: float = START_TIMEOUT_S,
) -> TensorGroup:  # fmt: skip
    """Meet the other ranks and return the group; `device` is where this rank's tensors are (cuda:N: a GPU a rank).

    `rendezvous` is a path for a small file that no earlier start has used; the caller removes what is left of it.
    `timeout_s` bounds every later call, `start_timeout_s` the meeting. Raises ConfigError, and StartupError if
    the others do not come.
    """
    if size < 1 or not 0 <= rank < size or timeout_s <= 0:
        raise ConfigError(f"no tensor-parallel group has rank {rank} of {size} with a timeout of {timeout_s} s")
    if size == 1:
        return SingleRank()
    where = torch.device(device)
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ConfigError(f"--tp {size} needs gloo", why="this torch was built without", todo="use --tp 1")
    if where.type == "cuda" and not distributed.is_nccl_available():
        raise ConfigError(f"--tp {size} on {where} needs NCCL", why="this torch was built without", todo="use --tp 1")
    try:
        store = distributed.PrefixStore(_PREFIX, distributed.FileStore(str(rendezvous), size))
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=start_timeout_s))
        gloo = _open_gloo(store, rank, size, timeout_s)
        nccl = _open_nccl(store, rank, size, timeout_s, where) if where.type == "cuda" else None
    except RuntimeError as error:
        raise StartupError(
            f"rank {rank} of {size} did not meet the other ranks", why=_first_line(error),
            todo="look for the rank that failed first; every start needs a new rendezvous file",
        ) from error  # fmt: skip
    return _DistributedGroup(rank, size, gloo=gloo, nccl=nccl, timeout_s=timeout_s)


class _DistributedGroup(TensorGroup):
    """Several ranks. gloo carries control and CPU tensors, NCCL the tensors on GPUs."""

    def __init__(self, rank: int, size: int, *, gloo: Any, nccl: Any, timeout_s: float) -> None:
        super().__init__(rank, size)
        self._gloo, self._nccl, self._timeout_s = gloo, nccl, timeout_s
        self._others = [other for other in range(size) if other != rank]
        self._broken = ""

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous():
            raise ValueError(f"only contiguous tensors are summed, strides are {tensor.stride()}")
        with self._unbroken():
            if tensor.is_cuda:
                options = torch.distributed.AllreduceOptions()
                options.asyncOp = False  # on this stream, behind the kernels that made the numbers
                _wait_nccl(self._nccl.allreduce([tensor], options))
            elif self.size == 2:
                other = torch.empty_like(tensor)
                self._swap([(self._others[0], tensor)], [(self._others[0], other)])
                tensor.add_(other)
            elif tensor.numel() * tensor.element_size() <= _DIRECT_BYTES:
                parts = self._gather(tensor)
                tensor.copy_(_sum_in_order(parts))
            else:
                self._reduce_by_pieces(tensor.view(-1))
        return tensor

    def gather_columns(self, part: Tensor) -> Tensor:
        if part.dim() != 2 or not part.is_contiguous():
            raise ValueError(f"only contiguous matrices are gathered, not {tuple(part.shape)} by {part.stride()}")
        rows, columns = part.shape
        if self.rank:
            with self._unbroken():
                if part.is_cuda:
                    _wait_nccl(self._nccl.gather([], [part], _to_rank_0()))
                else:
                    self._swap([(0, part)], [])
            return part.new_empty((0, self.size * columns))
        parts = part.new_empty((self.size, rows, columns))
        with self._unbroken():
            if part.is_cuda:
                _wait_nccl(self._nccl.gather([list(parts.unbind(0))], [part], _to_rank_0()))
            else:
                parts[0].copy_(part)
                self._swap([], [(other, parts[other]) for other in self._others])
        return parts.transpose(0, 1).reshape(rows, self.size * columns)

    def smallest(self, values: Sequence[int], *, timeout_s: float | None = None) -> tuple[int, ...]:
        with self._unbroken():
            parts = self._gather(torch.tensor(values, dtype=torch.int64), timeout_s)
        return tuple(int(value) for value in parts.amin(0))

    def abort(self, why: str) -> None:
        self._broken = self._broken or why
        nccl, self._gloo, self._nccl = self._nccl, None, None  # dropping the last reference closes the connections
        if nccl is not None:
            nccl.abort()

    def close(self) -> None:
        self.abort("it was closed")

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Run one call; whatever goes wrong in it breaks the group."""
        if self._broken:
            raise WorkerLostError("the tensor-parallel group is broken", why=self._broken, todo="restart the worker")
        try:
            yield
        except (RuntimeError, AttributeError) as error:
            # AttributeError: another thread aborted between two messages.
            if isinstance(error, AttributeError) and not self._broken:
                raise
            self.abort(_first_line(error))
            raise WorkerLostError(
                f"rank {self.rank} lost its tensor-parallel group of {self.size}", why=self._broken,
                todo="the worker has to restart; look for the rank that failed first",
            ) from error  # fmt: skip

    def _gather(self, tensor: Tensor, timeout_s: float | None = None) -> Tensor:
        """The tensors of all ranks, [size, ...], on every rank."""
        parts = tensor.new_empty((self.size, *tensor.shape))
        parts[self.rank].copy_(tensor)
        self._swap(((other, tensor) for other in self._others), ((other, parts[other]) for other in self._others),
                   timeout_s)  # fmt: skip
        return parts

    def _reduce_by_pieces(self, flat: Tensor) -> None:
        """Every rank sums one piece and sends it around: 2 · (size - 1) / size of the bytes instead of size - 1."""
        bounds = [flat.numel() * place // self.size for place in range(self.size + 1)]
        pieces = [flat[low:high] for low, high in pairwise(bounds)]
        mine = pieces[self.rank]
        parts = mine.new_empty((self.size, mine.numel()))
        parts[self.rank].copy_(mine)
        self._swap([(other, pieces[other]) for other in self._others], [(o, parts[o]) for o in self._others])
        mine.copy_(_sum_in_order(parts))
        self._swap([(other, mine) for other in self._others], [(o, pieces[o]) for o in self._others])

    def _swap(
        self, sent: Iterable[tuple[int, Tensor]], received: Iterable[tuple[int, Tensor]],
        timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """Send and receive over gloo: three times as fast as its collectives, which run in a thread of their own."""
        limit, gloo = timedelta(seconds=timeout_s or self._timeout_s), self._gloo
        works = [gloo.recv([tensor], other, _tag(tensor)) for other, tensor in received]
        works += [gloo.send([tensor], other, _tag(tensor)) for other, tensor in sent]
        for work in works:
            work.wait(limit)


def _tag(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size() % _TAGS


def _sum_in_order(parts: Tensor) -> Tensor:
    """The sum over dim 0, added one after another in fp32: torch.sum's own order depends on the shape."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total


def _open_gloo(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._threads = 1
    return distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), rank, size, options)


def _open_nccl(store: Any, rank: int, size: int, timeout_s: float, device: torch.device) -> Any:
    """The communicator itself is made by the first collective."""
    distributed: Any = torch.distributed
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl", store), rank, size, options)


def _wait_nccl(work: Any) -> None:
    """Make the current stream wait; None where the backend has done so itself."""
    if work is not None:
        work.wait()


def _to_rank_0() -> Any:
    options = torch.distributed.GatherOptions()
    options.rootRank, options.asyncOp = 0, False
    return options


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
