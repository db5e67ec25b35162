-- quarantine: (epoch or '' for a person, last step that was made, group_id, why, most to keep) -> 1 if the group is
-- quarantined now. It keeps its payloads, and a lease on it is lost. A group that a model learned from is retired
-- instead.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local id = ARGV[3]
local state = state_of(id)
if not state then return 0 end
if state == 'quarantined' then return 1 end
must_be_sound(id, state)
leave(id, state)
take_back(id, ARGV[2])
if retired(id) then return 0 end
redis.call('HSET', group_key(id), 'why', ARGV[4])
enter(id, 'quarantined', count('last_quarantined', 1))
if redis.call('ZCARD', base .. ':quarantined') > tonumber(ARGV[5]) then
  local oldest = redis.call('ZRANGE', base .. ':quarantined', 0, 0)[1]
  leave(oldest, 'quarantined')
  drop(oldest, 'poison')
end
return 1
