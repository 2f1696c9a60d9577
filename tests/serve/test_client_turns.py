"""The order of clients' calls: in turns, a limited number at once, and none for a client that has left."""

import asyncio
import time

from meshwright.serve.workers.client_turns import ClientTurns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_clients_take_turns():
    async def main() -> list[str]:
        turns, begun = ClientTurns(1, 1), list[str]()

        async def call(client: str) -> None:
            await turns.wait(client)
            begun.append(client)
            await settle()
            turns.end(client)

        await asyncio.gather(*(call(client) for client in ("a", "a", "a", "b", "b", "c")))
        return begun

    assert asyncio.run(main()) == ["a", "a", "b", "c", "a", "b"]  # the second waited before others came


def test_a_client_cannot_have_all_places():
    async def main() -> None:
        turns = ClientTurns(3, 2)
        await turns.wait("a")
        await turns.wait("a")
        third = asyncio.create_task(turns.wait("a"))
        await settle()
        assert not third.done()
        await asyncio.wait_for(turns.wait("b"), 1)
        turns.end("a")
        await asyncio.wait_for(third, 1)

    asyncio.run(main())


def test_clients_that_leave_take_no_turn():
    async def main() -> None:
        turns = ClientTurns(1, 1)
        await turns.wait("a")
        waiting = [asyncio.create_task(turns.wait("b")) for _ in range(3)]
        await settle()
        waiting[0].cancel()
        turns.end("a")
        waiting[1].cancel()  # its turn has just begun
        await settle()
        await asyncio.wait_for(waiting[2], 1)
        turns.end("b")
        await asyncio.wait_for(turns.wait("a"), 1)

    asyncio.run(main())


def test_thousands_of_waiting_calls_delay_nobody():
    """Each call that ended once woke all that waited."""

    async def main() -> None:
        turns = ClientTurns(2, 1)

        async def call() -> None:
            await turns.wait("a")
            await asyncio.sleep(0)
            turns.end("a")

        await asyncio.gather(*(call() for _ in range(5000)))

    began = time.process_time()
    asyncio.run(main())
    assert time.process_time() - began < 2
