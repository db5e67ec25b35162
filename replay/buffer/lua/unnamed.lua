-- unnamed: keys of groups and payloads in KEYS[2 ...] -> those that the books do not name, but for inserts in flight,
-- which have a short time to live.
local IN_FLIGHT_MS = 120000 -- as ORPHAN_TTL_S
local unnamed = {}
for i = 2, #KEYS do
  local kind, id, member, payload = string.match(KEYS[i], '^:(%a+):(%d+):?(%d*):?(.*)$', #base + 1)
  local named
  if kind == 'group' then
    named = state_of(id)
  elseif kind then
    local record = or_nothing(redis.pcall('HGET', group_key(id), (kind == 'blob' and 'member:' or 'partial:') .. member))
    named = record and state_of(id) and string.match(record, '^%d+:%d+') == payload
  end
  if not named then
    local left_ms = redis.call('PTTL', KEYS[i])
    if left_ms == -1 or left_ms > IN_FLIGHT_MS then unnamed[#unnamed + 1] = KEYS[i] end
  end
end
return unnamed
