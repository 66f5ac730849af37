"""The tasks whose result is still to come: waiting to be sent, in the channel, or in a worker's hands."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stateful_pipes.prefetch.channel import Message, receive, send
from stateful_pipes.prefetch.slots import Arena

__all__ = ["Task", "TaskQueue"]


@dataclass(slots=True)
class Task:
    """A ticket under way.

    Attributes:
        slot: Where its result is to lie; -1 for memory of its own.
        deaths: How many workers ended with it in hand.
        is_sent: Whether it is in the channel or in a worker's hands.
        is_forgotten: Whether nobody waits for the result.
    """

    ticket: Any
    message: Message
    slot: int
    deaths: int = 0
    is_sent: bool = False
    is_forgotten: bool = False


class TaskQueue:
    """Sends tasks to whichever worker takes them, and can take back those that none has.

    Attributes:
        unsent: The numbers of those that there was no room for yet.

    Args:
        here: The main process's end of the channel.
        there: The workers' end, of which the main process has a copy.
        arena: Lends a slot to each task.
    """

    def __init__(self, here: socket.socket, there: socket.socket, arena: Arena) -> None:
        self._here, self._there = here, there
        self._arena = arena
        self._tasks: dict[int, Task] = {}
        self.unsent: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, number: int) -> bool:
        return number in self._tasks

    def get(self, number: int) -> Task | None:
        """The task of this number, unless it is answered."""
        return self._tasks.get(number)

    def put(self, number: int, ticket: Any, message: Message) -> None:
        """Adds a task, and sends as many as there is room for.

        Raises:
            OSError: the ticket cannot be sent; then it is not added.
        """
        slot = self._arena.borrow()
        try:
            self._tasks[number] = Task(ticket, message, slot)
            self.unsent.append(number)
            self.flush()
        except Exception:
            self._tasks.pop(number, None)
            with suppress(ValueError):
                self.unsent.remove(number)
            self._arena.give_back(slot)
            raise

    def flush(self) -> None:
        """Sends as many as there is room for."""
        while self.unsent:
            number = self.unsent[0]
            task = self._tasks[number]
            try:
                send(self._here, task.message, number, task.slot)
            except OSError as error:
                # Full; or too many descriptors are under way to workers, if any are.
                is_busy = len(self.unsent) < len(self._tasks)
                if isinstance(error, BlockingIOError) or (error.errno == errno.ETOOMANYREFS and is_busy):
                    return
                raise
            self.unsent.popleft()
            task.is_sent = True

    def take_back(self) -> None:
        """Empties the channel: no worker takes anything any more until `send_again`."""
        while True:
            try:
                parcel = receive(self._there)
            except (OSError, EOFError):  # none left, or closed
                return
            self._tasks[parcel.task].is_sent = False

    def send_again(self, held: Container[int]) -> None:
        """Sends all those again that are neither in the channel nor among those that workers hold."""
        for number, task in list(self._tasks.items()):
            task.is_sent = task.is_sent and number in held
            if task.is_forgotten and not task.is_sent:
                self.drop(number)
        self.unsent = deque(number for number, task in self._tasks.items() if not task.is_sent)
        self.flush()

    def forget(self) -> None:
        """Drops what no worker has begun, and forgets the rest."""
        self.take_back()
        self.unsent.clear()
        for number, task in list(self._tasks.items()):
            task.is_forgotten = True
            if not task.is_sent:
                self.drop(number)

    def pop(self, number: int) -> Task | None:
        """Removes a task that is answered, unless it is gone; its slot is the answer's."""
        return self._tasks.pop(number, None)

    def drop(self, number: int) -> None:
        """Removes a task that nobody runs."""
        self._arena.give_back(self._tasks.pop(number).slot)
