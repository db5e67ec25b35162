-- join_broadcast: (actor, time to live in ms), KEYS: members, scored by the Redis time in ms at which they expire.
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[1])
