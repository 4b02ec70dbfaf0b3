"""The lease on weight operations: scripts for the store, and acknowledgements of members. Pure.

The lease is a key with a time to live; its value has a fencing token, which increases with each
holder. A write is a script that compares that value first, so a holder that was cut off for longer
than its lease can't overwrite the state of its successor. Invariant: if two proxies act as holder,
only one can publish, and a proxy acknowledges only states that it has applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# KEYS: lease, fencing token. ARGV: member, milliseconds. Returns the new holder's fencing token, or
# 0 and the value of the present lease.
ACQUIRE: Final = """
local held = redis.call('GET', KEYS[1])
if held then return {0, held} end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], token .. ':' .. ARGV[1], 'PX', ARGV[2])
return {token, ''}
"""
# KEYS: lease, state. ARGV: value of the lease, milliseconds, state, channel, message. Returns 1 if
# the state was written.
WRITE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[5])
return 1
"""
# KEYS: lease. ARGV: its value, milliseconds. Returns 1 if it is still held.
RENEW: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
# KEYS: fencing token, state. ARGV: fencing token and number of the state, the state. For a store
# that has lost its data. Tokens above `messages.Ordinal` are invalid. Returns 1 if the state was
# written.
RESTORE: Final = """
local stored = redis.call('GET', KEYS[2])
local token, number = tonumber(ARGV[1]), tonumber(ARGV[2])
if stored then
  local is_read, known = pcall(cmsgpack.unpack, stored)
  local held = is_read and type(known) == 'table' and tonumber(known.token)
  if held and held <= 2^62 then
    local same = held == token and (tonumber(known.number) or 0) >= number
    if same or held > token then return 0 end
  end
end
redis.call('SET', KEYS[2], ARGV[3])
local used = tonumber(redis.call('GET', KEYS[1]) or '0') or 0
if used < token or used > 2^62 then redis.call('SET', KEYS[1], ARGV[1]) end
return 1
"""
# KEYS: lease. ARGV: milliseconds. Returns the lease's value. The time to live is limited to the
# milliseconds: the store expires keys by its wall clock, and if that was set back, the lease of a
# dead holder would last too long.
READ: Final = """
local held = redis.call('GET', KEYS[1])
local left = redis.call('PTTL', KEYS[1])
if left > tonumber(ARGV[1]) or left == -1 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return held
"""
# KEYS: leases of members. ARGV: milliseconds, as for READ. Returns for each 1 if it is held, or 0.
READ_MEMBERS: Final = """
local holds = {}
for place, key in ipairs(KEYS) do
  local left = redis.call('PTTL', key)
  if left > tonumber(ARGV[1]) or left == -1 then redis.call('PEXPIRE', key, ARGV[1]) end
  holds[place] = left == -2 and 0 or 1
end
return holds
"""
# KEYS: lease. ARGV: its value.
RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""


class Acknowledgements:
    """The highest number that each member has acknowledged, under one fencing token."""

    def __init__(self, fencing_token: int) -> None:
        self.fencing_token = fencing_token
        self._numbers: dict[str, int] = {}

    def take(self, member: str, fencing_token: int, number: int) -> None:
        if fencing_token == self.fencing_token:
            self._numbers[member] = max(number, self._numbers.get(member, 0))

    def missing(self, members: Iterable[str], number: int) -> list[str]:
        """The members that have not acknowledged `number`."""
        return sorted(name for name in members if self._numbers.get(name, 0) < number)


def fencing_token_of(value: bytes | None) -> int:
    """The token in a lease's value; 0 for None, and for a value that no proxy has written."""
    digits = (value or b"").partition(b":")[0]
    fencing_token = int(digits) if digits.isdigit() and len(digits) < 20 else 0
    return fencing_token if fencing_token <= 2**62 else 0


class MemberLease:
    """This proxy's member lease in the store, timed by the local clock.

    It never outlasts the store's key, because its time counts from before the command was sent.
    """

    def __init__(self) -> None:
        self.renewed_at = float("-inf")

    def renewed(self, sent_at: float) -> None:
        self.renewed_at = sent_at

    def holds(self, now: float, lease_secs: float) -> bool:
        return now - self.renewed_at < lease_secs
