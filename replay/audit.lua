-- audit: {counters, {state, group_id, score in that state, fields of the group, {payload, its milliseconds to live ...}}
-- for each, {ready groups by version, by score, by step}}, at one instant.
local groups = {}
for _, state in ipairs(STATES) do
  local found = redis.call('ZRANGE', base .. ':' .. state, 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local id = found[i]
    local fields, payloads = redis.call('HGETALL', group_key(id)), {}
    for f = 1, #fields, 2 do
      local kind, member = string.match(fields[f], '^(%a+):(%d+)$')
      if kind == 'member' or kind == 'partial' then
        local payload = payload_key(kind == 'member' and 'blob' or kind, id, member, fields[f + 1])
        payloads[#payloads + 1] = payload
        payloads[#payloads + 1] = redis.call('PTTL', payload)
      end
    end
    groups[#groups + 1] = { state, id, found[i + 1], fields, payloads }
  end
end
local indexes = {}
for _, index in ipairs({ ':ready_by_version', ':ready_by_score', ':ready_by_step' }) do
  indexes[#indexes + 1] = redis.call('ZRANGE', base .. index, 0, -1, 'WITHSCORES')
end
return { redis.call('HGETALL', counters), groups, indexes }
