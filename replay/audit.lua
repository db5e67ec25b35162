-- audit: {counters, {state, group_id, fields of the group} for each, all keys of groups and payloads, and the
-- milliseconds that each of them has to live}, at one instant. It walks every key of the server while others wait.
local groups = {}
for _, state in ipairs(STATES) do
  for _, id in ipairs(redis.call('ZRANGE', base .. ':' .. state, 0, -1)) do
    groups[#groups + 1] = { state, id, redis.call('HGETALL', group_key(id)) }
  end
end
local keys, lifetimes = {}, {}
for _, kind in ipairs({ ':group:*', ':blob:*', ':partial:*' }) do
  local cursor = '0'
  repeat
    local found = redis.call('SCAN', cursor, 'MATCH', base .. kind, 'COUNT', 1000)
    cursor = found[1]
    for _, key in ipairs(found[2]) do
      keys[#keys + 1] = key
      lifetimes[#lifetimes + 1] = redis.call('PTTL', key)
    end
  until cursor == '0'
end
return { redis.call('HGETALL', counters), groups, keys, lifetimes }
