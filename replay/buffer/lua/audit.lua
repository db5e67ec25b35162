-- audit: -> {counters, groups, indexes, damaged}, at one instant.
-- groups: {state, group_id, score in that state, the fields in NEEDED, {payload key, its time to live in ms ...}} each.
-- indexes: the ready groups by version and by step. damaged: each malformed key, or key and field.
local NEEDED = { num_members = true, num_stored = true, finished = true, newest_policy_version = true,
  uses = true, fence = true, judge_fence = true, is_judged = true, verdict = true, is_equal = true }
local groups, damaged = {}, {}

local function readable(name, command, ...)
  local found = or_nothing(redis.pcall(command, name, ...))
  if not found then damaged[#damaged + 1] = name end
  return found or {}
end

for _, state in ipairs(STATES) do
  local found = readable(base .. ':' .. state, 'ZRANGE', 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local id, facts, payloads = found[i], {}, {}
    local fields = readable(group_key(id), 'HGETALL')
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
        if not read_record(value) then damaged[#damaged + 1] = group_key(id) .. ' ' .. name end
      end
    end
    groups[#groups + 1] = { state, id, found[i + 1], facts, payloads }
  end
end
local indexes = {}
for _, index in ipairs({ ':ready_by_version', ':ready_by_step' }) do
  indexes[#indexes + 1] = readable(base .. index, 'ZRANGE', 0, -1, 'WITHSCORES')
end
local books = readable(counters, 'HGETALL')
readable(base .. ':last_claim', 'LRANGE', 0, 1)
readable(base .. ':failures', 'LRANGE', 0, 0)
return { books, groups, indexes, damaged }
