"""Which place of the key-value store holds which token: a pool with reference counts and a tree of known prefixes.

A page holds one token. Rows of a group then share a prompt to the last token without copying or computing anything twice.

Invariants:
* A page is free, or counted once by every row and every tree node that uses it.
* A node is reached by exactly the tokens that its page and its ancestors' pages were computed from (no hashing).
* Page 0 belongs to nobody: padding writes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_EVICT_AHEAD = 256


class PagePool:
    """Pages 1 … num_pages−1, counted."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._uses = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page, used once. Raises IndexError when there is none."""
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def share(self, page: int) -> None:
        self._uses[page] += 1

    def release(self, page: int) -> None:
        self._uses[page] -= 1
        if self._uses[page] == 0:
            self._free.append(page)

    def uses(self, page: int) -> int:
        return self._uses[page]


class _Node:
    __slots__ = ("children", "last_used", "page", "parent", "token", "version")

    def __init__(self, page: int, token: int, parent: _Node | None, version: int) -> None:
        self.page = page
        self.token = token
        self.parent = parent
        self.version = version
        self.children: dict[int, _Node] = {}
        self.last_used = 0


class PrefixTree:
    """Exact prefixes whose keys and values are in the pool. The caller clears it when the weights change, or keeps it knowingly."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = _Node(0, -1, None, -1)
        self._clock = 0
        self.size = 0

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int | None]:
        """Pages of the longest known prefix of `tokens`, and the oldest weights version they were computed with.

        The caller gets a use of each page.
        """
        self._clock += 1
        node, pages = self._root, []
        oldest: int | None = None
        for token in tokens:
            found = node.children.get(token)
            if found is None:
                break
            node = found
            node.last_used = self._clock
            self._pool.share(node.page)
            pages.append(node.page)
            oldest = node.version if oldest is None else min(oldest, node.version)
        return pages, oldest

    def insert(self, tokens: Sequence[int], pages: Sequence[int], version: int) -> None:
        """Makes `tokens` known as computed with `version`; where a prefix is known already its first pages stay."""
        self._clock += 1
        node = self._root
        for token, page in zip(tokens, pages, strict=True):
            child = node.children.get(token)
            if child is None:
                child = _Node(page, token, node, version)
                self._pool.share(page)
                node.children[token] = child
                self.size += 1
            child.last_used = self._clock
            node = child

    def evict(self, wanted: int) -> None:
        """Forgets what was used longest ago and no row uses, until `wanted` pages are free or nothing is left to forget.

        Once it has to look, it frees some more than asked for, so that it need not look again at once.
        """
        if self._pool.num_free >= wanted:
            return
        goal = wanted + _EVICT_AHEAD
        ends = sorted((n for n in self._nodes() if not n.children), key=lambda n: n.last_used)
        for end in ends:
            node: _Node | None = end
            while node is not None and node.parent is not None and not node.children:
                if self._pool.num_free >= goal or self._pool.uses(node.page) > 1:
                    break
                parent = node.parent
                self._drop(node)
                node = parent

    def clear(self) -> None:
        """Forgets everything, for instance because the weights changed."""
        for node in list(self._nodes()):
            self._pool.release(node.page)
        self._root.children.clear()
        self.size = 0

    def _drop(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.token]
        self._pool.release(node.page)
        self.size -= 1

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
