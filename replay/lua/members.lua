-- members: -> {name, record} of each member that has not expired; false for a missing record.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local names = redis.call('ZRANGEBYSCORE', KEYS[2], now_ms, '+inf')
if #names == 0 then return {} end
local members = {}
for i, name in ipairs(names) do members[i] = { name, redis.call('HGET', KEYS[1], name) } end
return members
