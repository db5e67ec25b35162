-- requeue: (request, group ids ...) -> how many. Queues groups again that are quarantined, leased, judging, or ready and
-- never used; their members are dropped, and their attempts are counted from 0. A request that is repeated because its reply
-- was lost changes nothing more.
local refusal = fenced_out('')
if refusal then return refusal end
local num_requeued = 0
for i = 2, #ARGV do
  local id = ARGV[i]
  local state, group = state_of(id), group_key(id)
  if redis.call('HGET', group, 'requeued') == ARGV[1] then
    num_requeued = num_requeued + 1
  elseif state == 'quarantined' or state == 'leased' or state == 'judging' or (state == 'ready' and not last_use(id)) then
    must_be_sound(id, state)
    local opened = redis.call('HMGET', group, 'num_members', 'ticket', 'max_attempts', 'opened_ms', 'is_judged')
    leave(id, state)
    remove_group(id, 'dropped:requeued')
    redis.call('HSET', group, 'num_members', opened[1], 'ticket', opened[2], 'max_attempts', opened[3],
      'opened_ms', opened[4], 'num_stored', 0, 'requeued', ARGV[1])
    if opened[5] then redis.call('HSET', group, 'is_judged', opened[5]) end
    enter(id, 'queued', id)
    num_requeued = num_requeued + 1
  end
end
return num_requeued
