-- unnamed: keys of groups and payloads in KEYS[2 ...] -> those without a time to live that the books do not name.
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
  if not named and redis.call('PTTL', KEYS[i]) == -1 then unnamed[#unnamed + 1] = KEYS[i] end
end
return unnamed
