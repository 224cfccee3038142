"""Requests that wait, in the order in which they will be served.

vLLM: V0 a deque in core/scheduler.py, sorted in place for priorities; V1 v1/core/sched/request_queue.py.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

from refengine.v1.request import Request


class RequestQueue(ABC):
    """The scheduler looks at the head, and takes it only once it has been admitted."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Enters a request that has just arrived. Mutates: the queue."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """Enters a preempted request: it was served before and goes ahead of equals. Mutates: the queue."""

    @abstractmethod
    def peek(self) -> Request:
        """The request to serve next. Raises: IndexError if there is none."""

    @abstractmethod
    def pop(self) -> Request:
        """Takes the request to serve next. Mutates: the queue. Raises: IndexError if there is none."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Takes out one request, for example an aborted one. Mutates: the queue. Raises: ValueError."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In service order."""

    @abstractmethod
    def __len__(self) -> int: ...


class FCFSQueue(RequestQueue):
    """First come, first served; a preempted request goes to the head."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue(RequestQueue):
    """Smallest priority value first, then earliest arrival. Preemption gives no head start: the order is total."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrival, request.request_id, request))

    put_back = add

    def peek(self) -> Request:
        return self._heap[0][-1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        self._heap.remove((request.priority, request.arrival, request.request_id, request))
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))

    def __len__(self) -> int:
        return len(self._heap)


def make_queue(policy: str) -> RequestQueue:
    """The queue for `policy`, "fcfs" or "priority"."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()
