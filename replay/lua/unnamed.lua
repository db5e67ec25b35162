-- unnamed: keys of groups and payloads in KEYS[2 ...] -> those that are there for good and that the books do not name.
local unnamed = {}
for i = 2, #KEYS do
  local kind, id, member, payload = string.match(KEYS[i], '^:(%a+):(%d+):?(%d*):?(.*)$', #base + 1)
  local named
  if kind == 'group' then
    named = state_of(id)
  else
    local record = redis.call('HGET', group_key(id), (kind == 'blob' and 'member:' or 'partial:') .. member)
    named = record and string.match(record, '^%d+:%d+') == payload
  end
  if not named and redis.call('PTTL', KEYS[i]) == -1 then unnamed[#unnamed + 1] = KEYS[i] end
end
return unnamed
