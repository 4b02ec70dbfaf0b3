from omni_proxy.wire.errors import Refusal


async def session(conn, mine, head):
    raise Refusal(501, "soon", "soon")
