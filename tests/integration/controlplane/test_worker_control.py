"""Answers of workers to their cluster's orders; what real workers do is tested with them."""

from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.controlplane.worker_control import WorkerControlClient
from tandem.core.call_proof import CONTROL
from tandem.core.errors import UnavailableError
from tandem.core.ids import WorkerId
from tandem.core.secret import ClusterSecret
from tandem.rpc.v1 import control_pb2 as c
from tandem.workerhost.relay import SERVICE
from tools.made_up_worker import let_in


@pytest.mark.parametrize(("field", "value"), [("state", "asleep"), ("role", "cook"), ("target_role", "cook")])
async def test_a_worker_of_another_release_is_not_understood(field: str, value: str) -> None:
    """As good as silent: the controlling process goes on with the others, and asks again."""
    reply = c.ControlReply(worker="d0", incarnation=1, role="decode", state="ready")
    setattr(reply, field, value)

    async def control(request: c.ControlRequest, context: Any) -> c.ControlReply:
        await let_in(context, secret, CONTROL)
        return reply

    secret = ClusterSecret.generate()
    handler = grpc.unary_unary_rpc_method_handler(
        control,
        request_deserializer=c.ControlRequest.FromString,
        response_serializer=c.ControlReply.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Control": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(UnavailableError, match=f"of worker d0 .* is not understood.*{value}"):
            await WorkerControlClient(secret, lambda _: f"127.0.0.1:{port}").look(WorkerId("d0"))
    finally:
        await server.stop(None)
