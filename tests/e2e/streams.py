"""Answers over gRPC with prompts of token ids, with right tokens known by arithmetic; all the time or one by one."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc
from tools.running_cluster import Cluster
from tools.waiting import wait_for


class Client(threading.Thread):
    """One answer over gRPC. `tokens` and `error` are complete when it has ended."""

    def __init__(self, address: str, prompt: list[int], count: int) -> None:
        super().__init__(daemon=True)
        self.address, self.prompt, self.count = address, prompt, count
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.error = ""
        self.start()

    def run(self) -> None:
        request = i.GenerateRequest(
            model="tandem-tiny",
            token_ids=i.TokenIds(ids=self.prompt),
            sampling=i.GenerateSampling(max_tokens=self.count, temperature=0, ignore_eos=True),
        )
        try:
            with grpc.insecure_channel(self.address) as channel:
                for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=90):
                    self.cached_tokens = max(self.cached_tokens, response.usage.cached_tokens)
                    for delta in response.choices:
                        self.tokens += delta.token_ids
        except grpc.RpcError as error:
            self.error = str(error)

    def check(self) -> None:
        """Check that it ended well, with every token once."""
        self.join(100)
        assert not self.is_alive(), "the answer hangs"
        assert self.error == ""
        assert self.tokens == expected_tokens(self.prompt, self.count, 4096, eos_token_ids=(1,))


def prompt(number: int, tokens: int = 150) -> list[int]:
    """Each begins with a block of its own."""
    return [*random.Random(number).choices(range(600, 3600), k=tokens)]


@contextmanager
def load(cluster: Cluster, streams: int = 4, prompt_tokens: int = 150, shortest: int = 20) -> Iterator[list[Client]]:
    """Keep `streams` answers running, each stream one after the other, until the block ends; all are checked. Those of
    the first stream have `shortest` tokens, of every other one 7 more than of the one before."""
    is_over, lock = threading.Event(), threading.Lock()
    clients: list[Client] = []

    def ask(stream: int) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            asked = prompt(1000 * stream + number, prompt_tokens)
            client = Client(cluster.context["grpc"], asked, shortest + 7 * stream)
            with lock:
                clients.append(client)
            client.join()

    threads = [threading.Thread(target=ask, args=(stream,), daemon=True) for stream in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        is_over.set()
        for thread in threads:
            thread.join(100)
    for client in clients:
        client.check()


def wait_for_answers(clients: list[Client], more: int) -> None:
    """Wait until so many more than now are complete."""
    done = sum(not client.is_alive() for client in clients) + more
    wait_for(lambda: sum(not client.is_alive() for client in clients) >= done, 60, "answers come")
