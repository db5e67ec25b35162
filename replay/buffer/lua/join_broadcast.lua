-- join_broadcast: (name, time to live in ms). Adds or renews a name. KEYS: members; a score is the time of expiry in
-- ms.
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[1])
-- A member that has died would otherwise stay as long as the server's clock was set back.
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now_ms + 10 * ARGV[2], '+inf')) do
  redis.call('ZADD', KEYS[1], now_ms + ARGV[2], name)
end
