-- audit: {counters, {state, group_id, score in that state, what the recount needs of the group's fields, {payload, its
-- milliseconds to live ...}} for each, {ready groups by version, by score, by step}}, at one instant.
local NEEDED = { num_members = true, num_stored = true, finished = true, oldest_policy_version = true, score = true,
  uses = true, fence = true }
local groups = {}
for _, state in ipairs(STATES) do
  local found = redis.call('ZRANGE', base .. ':' .. state, 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local id, facts, payloads = found[i], {}, {}
    local fields = redis.call('HGETALL', group_key(id))
    for f = 1, #fields, 2 do
      local name, value = fields[f], fields[f + 1]
      local kind, member = string.match(name, '^(%a+):(%d+)$')
      if NEEDED[name] then
        facts[#facts + 1] = name
        facts[#facts + 1] = value
      elseif kind == 'member' or kind == 'partial' then
        local payload = payload_key(kind == 'member' and 'blob' or kind, id, member, value)
        payloads[#payloads + 1] = payload
        payloads[#payloads + 1] = redis.call('PTTL', payload)
      end
    end
    groups[#groups + 1] = { state, id, found[i + 1], facts, payloads }
  end
end
local indexes = {}
for _, index in ipairs({ ':ready_by_version', ':ready_by_score', ':ready_by_step' }) do
  indexes[#indexes + 1] = redis.call('ZRANGE', base .. index, 0, -1, 'WITHSCORES')
end
return { redis.call('HGETALL', counters), groups, indexes }
