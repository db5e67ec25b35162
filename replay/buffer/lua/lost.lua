-- lost: (epoch, last step that was made, group_id, member, record). Drops a group that lost the payload of this record.
-- Where the server went back to before it stored the record, the member is played again.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local id = ARGV[3]
local state = state_of(id)
if not state then return end
must_be_sound(id, state)
if redis.call('HGET', group_key(id), 'member:' .. ARGV[4]) ~= ARGV[5] then return end
leave(id, state)
take_back(id, ARGV[2])
drop(id, 'lost_payload')
