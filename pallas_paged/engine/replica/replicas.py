"""The replicas of an engine as one, and which of them serves a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import jax

from pallas_paged.attention.tuning import tuning_key
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.device.compilation import BackgroundCompilation, own_settings
from pallas_paged.engine.device.executor import EngineDeadError, Executor
from pallas_paged.engine.device.placement import Weights, placements, shapes_of
from pallas_paged.engine.device.processes import Followers, Leader, connect, interrupts_held
from pallas_paged.engine.device.program import modes_for
from pallas_paged.engine.device.runner import WarmupStep
from pallas_paged.engine.model import Model
from pallas_paged.engine.outputs import RequestOutput
from pallas_paged.engine.replica.replica import Replica
from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.sampling_params import SamplingMode, WarmupParams
from pallas_paged.pages.prefix_cache import Block, chained_hash

_MIN_PAGES = 2  # a shorter prefix is computed sooner than it is worth a longer queue
_MAX_RATIO = 1.25  # of a replica's load to the smallest one, ...
_MAX_REQUESTS = 4  # ... or how many requests like this one it may have beyond that


class Router:
    """Chooses replicas.

    The load of a replica is the tokens that its unfinished requests may have in all. A request
    goes to the replica with the longest prefix of it: in its prefix cache, or in a prompt that it
    was sent before, which may not be computed yet. Replicas that are both a quarter and four such
    requests ahead of the least loaded one do not count. If no other has a prefix of two pages, the
    request goes to the least loaded one, which then computes the prefix as well. So does one with
    given experts, which has no prefix in common with others.
    """

    def __init__(self, replicas: Sequence[Replica], page_size: int):
        self._replicas, self._page_size = replicas, page_size
        # Of each replica, the keys of full pages of prompts that it was sent, the newest last.
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in replicas]

    def choose(self, request: Request) -> Replica:
        """Return the replica for a new request, and count on its being sent."""
        if len(self._replicas) == 1:
            return self._replicas[0]
        loads = [replica.load for replica in self._replicas]
        least = min(loads)
        chosen = loads.index(least)
        if self._replicas[0].cache is not None and request.given_experts is None:
            blocks = _blocks(request, self._page_size)
            most = max(_MAX_RATIO * least, least + _MAX_REQUESTS * request.load)
            found = [
                self._num_pages(index, blocks) if load <= most else 0
                for index, load in enumerate(loads)
            ]
            longest = max(found)
            if longest >= _MIN_PAGES:
                chosen = min(range(len(loads)), key=lambda i: (-found[i], loads[i]))
            self._note(chosen, blocks)
        return self._replicas[chosen]

    def reset(self) -> None:
        """Forget what was sent, with the prefix caches."""
        for sent in self._sent:
            sent.clear()

    def _num_pages(self, index: int, blocks: Sequence[Block]) -> int:
        """Pages of a prefix that a replica has, or is about to compute."""
        cache, sent = self._replicas[index].cache, self._sent[index]
        assert cache is not None
        count = cache.num_cached_pages(blocks)
        while count < len(blocks) and blocks[count][0] in sent:
            count += 1
        return count

    def _note(self, index: int, blocks: Sequence[Block]) -> None:
        sent = self._sent[index]
        for key, _ in blocks:
            sent.pop(key, None)
            sent[key] = None
        while len(sent) > self._replicas[index].num_pages:
            sent.popitem(last=False)


def _blocks(request: Request, page_size: int) -> list[Block]:
    """Return the full pages of a prompt; the request keeps them for the prefix cache."""
    blocks, tokens = request.block_hashes, request.prompt_token_ids
    for start in range(len(blocks) * page_size, len(tokens) - page_size + 1, page_size):
        content = tuple(tokens[start : start + page_size])
        blocks.append((chained_hash(blocks[-1][0] if blocks else 0, content), content))
    return blocks


class Replicas:
    """The replicas of an engine, dead or alive together; iterate over them, or index one.

    Attributes:
        error: why they are dead; None while they are alive.
        followers: the other processes; None if there are none, or this is one of them.
        leader: process 0, if this is another one of several.
        num_processes: of the engine.
        num_pages, max_model_len: of each replica.
    """

    @own_settings()
    def __init__(
        self,
        model: Model,
        params: Any,
        config: EngineConfig,
        devices: Sequence[jax.Device] | None,
        tokenizer: Tokenizer | None,
        draft_params: Any = None,
    ):
        """Put the parameters on the devices of each replica, and create the pools in what is left.

        Arguments and errors are those of `Engine`.
        """
        places = placements(config.tensor_parallel_size, config.data_parallel_size, devices)
        model.kv_cache_spec.on_devices(config.tensor_parallel_size)
        draft, drafting = config.draft_model, draft_params is not None
        if (draft is not None) != drafting:
            what = "be None without" if drafting else "be the weights of"
            raise ValueError(f"draft_params must {what} a 'model' of speculative_config")
        if draft is not None and config.speculation is not None:
            config.speculation.check_target(model)
            draft.kv_cache_spec.on_devices(config.tensor_parallel_size)
        self.error: BaseException | None = None
        self.followers: Followers | None = None
        self.leader: Leader | None = None
        self._compiling: BackgroundCompilation | None = None
        self.num_processes = places[0].num_processes
        if self.num_processes > 1:
            sizes = model.vocab_size, model.max_model_len, model.eos_token_ids, model.kv_cache_spec
            described = config, sizes, shapes_of(params), tuning_key()
            if draft is not None:
                described += draft.kv_cache_spec, shapes_of(draft_params)  # type: ignore
            self.followers, self.leader = connect(repr(described))
        weights = [Weights(model, params, place) for place in places]
        drafts: list[Weights | None] = [None] * len(places)
        if draft is not None:
            drafts = [Weights(draft, draft_params, place, "draft_params") for place in places]
        if places[0].mesh is not None:
            given = [one.leaves for one in (*weights, *drafts) if one is not None]
            jax.block_until_ready(given)
        self.num_pages, self.max_model_len, windows = config.sizes(model, places)
        self._all = [
            Replica(
                Executor(
                    model,
                    one,
                    config,
                    place,
                    num_pages=self.num_pages,
                    max_len=self.max_model_len,
                    windows=windows,
                    followers=self.followers,
                    draft_weights=of_draft,
                ),
                tokenizer,
            )
            for one, of_draft, place in zip(weights, drafts, places, strict=True)
        ]
        self._router = Router(self._all, config.page_size)
        self._by_id: WeakValueDictionary[str, Request] = WeakValueDictionary()
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Replica:
        return self._all[index]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished, no output is left to take, and no call to read."""
        return all(one.outputs.idle and not one.calls_in_flight for one in self._all)

    def add(self, request: Request) -> None:
        """Number a new request, and give it to a replica for good.

        Raises:
            ValueError: its id is in use.
        """
        request_id = request.request_id
        other = self._by_id.get(request_id)
        if other is not None and not other.finished:
            raise ValueError(f"{request_id=} is that of another request")
        if not request_id:
            request_id = str(self._num_requests)
            while request_id in self._by_id:
                request_id += "-"
        request.number, request.request_id = self._num_requests, request_id
        self._router.choose(request).add(request)
        self._by_id[request_id] = request
        self._num_requests += 1

    def find(self, request: Request | str) -> Request:
        """Return a request, given itself or its id.

        Raises:
            ValueError: it is not a request of this engine.
        """
        if isinstance(request, str):
            if (found := self._by_id.get(request)) is None:
                raise ValueError(f"{request=} is not the id of a request")
            request = found
        if not isinstance(request, Request):
            raise ValueError(f"{request=} must be a Request or its id")
        if not request.finished and self._serving(request) is None:
            raise ValueError(f"request {request.request_id!r} is of another engine")
        return request

    def abort(self, request: Request) -> None:
        """End a request as it stands; one that is not served stays as it is."""
        if (replica := self._serving(request)) is not None:
            replica.abort(request)

    def take_outputs(self) -> list[RequestOutput]:
        """Return what is new of each request since the last time."""
        return [output for replica in self._all for output in replica.outputs.take_outputs()]

    def drop_outputs(self, requests: Container[Request]) -> list[Request]:
        """Report nothing new of these requests; return those that have finished meanwhile."""
        return [one for replica in self._all for one in replica.outputs.drop_outputs(requests)]

    def step(self) -> None:
        """Dispatch the next call of each replica, and read the one before."""
        # All devices have work before the host waits for any.
        dispatched = [replica.dispatch() for replica in self._all]
        for replica, num_calls in zip(self._all, dispatched, strict=True):
            replica.finish_step(num_calls)

    def drain(self) -> None:
        """Read all calls in flight."""
        for replica in self._all:
            replica.drain()

    @own_settings()
    def update_params(
        self, params: Any, draft_params: Any, reset_prefix_cache: bool, restart_running: bool
    ) -> None:
        """Use other parameters from the next call on, as `Engine.update_params`."""
        self.check_alive()
        given = [([one.weights for one in self._all], params)]
        if draft_params is not None:
            drafts = [x for one in self._all if (x := one.runner.executor.draft_weights)]
            if not drafts:
                raise ValueError("draft_params must be None without a draft model")
            given.append((drafts, draft_params))

        def check() -> None:
            for each, new in given:
                each[0].check(new)

        if self.leader is None:
            check()
        with self.fatal():
            self.drain()
        with self.fatal(only_if_multi_process=True):
            check()  # in the others: process 0 has new ones already
            if self.followers is not None:
                self.followers.send("release")
            leaves = [(one, one.put(new)) for each, new in given for one in each]
            for one, put in leaves:
                one.leaves = put
            if self.followers is not None:
                self.followers.rejoin()
            if restart_running:
                for replica in self._all:
                    replica.restart()
            if reset_prefix_cache:
                self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        for replica in self._all:
            replica.scheduler.reset_prefix_cache()
        self._router.reset()

    def sleep(self) -> None:
        """Read all calls in flight, and free the pools."""
        self.drain()
        for replica in self._all:
            replica.sleep()
        self._router.reset()

    @own_settings()
    def warmup(self, params: WarmupParams, progress: bool) -> None:
        """Compile the steps of all shapes for such requests."""
        modes = self._modes_for(params)
        for replica in self._all:  # later ones find more in JAX's caches
            replica.runner.warmup(modes, progress)

    @own_settings()
    def start_warmup(self, params: WarmupParams, progress: bool) -> Future[None]:
        """Compile what can serve such requests, and start to compile the rest.

        Returns:
            As of `Engine.start_warmup`.
        """
        rest: list[WarmupStep] = []
        if self.num_processes > 1:  # all make their calls in the same order
            self.warmup(params, progress)
        else:
            modes = self._modes_for(params)
            for replica in self._all:
                rest += replica.runner.start_warmup(modes, progress)
        self._compiling = BackgroundCompilation(rest)
        return self._compiling.done

    def _modes_for(self, params: WarmupParams) -> list[SamplingMode]:
        """Return the modes to compile, once no thread compiles any more."""
        if not self.idle:
            raise ValueError("warmup must run while the engine is idle")
        if self._compiling is not None:
            self._compiling.join()
        return modes_for(params)

    @contextmanager
    def fatal(self, *, only_if_multi_process: bool = False) -> Iterator[None]:
        """Hold back Ctrl-C in this block; end everything if it fails, with the state lost.

        `only_if_multi_process`: only if there are other processes, whose state is then another one.
        """
        completed = True  # before it begins
        try:
            with own_settings(), interrupts_held():
                completed = only_if_multi_process and self.num_processes == 1
                yield
                completed = True
        except BaseException as error:
            if completed:  # Ctrl-C, which was held back, or nothing is lost
                raise
            self.die(error, "a step failed")

    def die(self, error: BaseException, what: str) -> NoReturn:
        """End all requests and the calls in flight, also in other processes; raise the error."""
        if isinstance(error, Exception) and any(one.weights.are_deleted for one in self._all):
            error = EngineDeadError("params have been deleted, or donated elsewhere", error)
        self.error = error
        for replica in self._all:
            replica.fail(error)
        if self.followers is not None:
            self.followers.close(error)
        if self.leader is not None:
            self.leader.fail(error)
        raise EngineDeadError(what, error) if isinstance(error, Exception) else error

    @own_settings()
    def follow(self) -> bool:
        """Make the calls of process 0; results and errors are those of `Engine.follow`."""
        self.check_alive()
        if self.leader is None:
            raise RuntimeError("follow() is for the processes that follow process 0")
        try:
            released = self.leader.follow(self._all[0].runner.executor)
        except BaseException as error:
            self.die(error, "process 0 can't be followed")
        if not released:
            self.close("process 0 has closed it")
        return released

    def close(self, reason: str) -> None:
        """Be dead from now on, without a failure; `follow` returns False in other processes."""
        self.error = RuntimeError(reason)
        for one in (self.followers, self.leader):
            if one is not None:
                one.close()
        if self._compiling is not None:
            self._compiling.stop()

    def check_alive(self) -> None:
        """Raise EngineDeadError if the replicas are dead."""
        if self.error is not None:
            raise EngineDeadError("the engine is dead", self.error)

    def check_usable(self) -> None:
        """Raise also RuntimeError if they follow process 0."""
        self.check_alive()
        if self.leader is not None:
            raise RuntimeError("process 0 uses the engine; the others call follow()")

    def _serving(self, request: Request) -> Replica | None:
        """Return the replica that has an unfinished request."""
        return next((one for one in self._all if request in one.outputs.groups), None)
