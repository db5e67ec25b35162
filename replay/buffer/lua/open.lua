-- open: (epoch, max_attempts, then group_id, num_members, ticket, 1 if a judge marks the group or else 0 for each)
-- -> how many were new. Ids rise: an id at or below the last one was opened before, even if its group has left Redis.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local opened_last = redis.call('HGET', counters, 'last_group_id') or '-1'
local last = opened_last == '-1' and -1 or whole(opened_last)
if not last then error('DAMAGED: last_group_id is not a number') end
local num_opened, now = 0, now_ms()
for i = 3, #ARGV, 4 do
  local id = ARGV[i]
  if tonumber(id) > last then
    last = tonumber(id)
    redis.call('HSET', group_key(id), 'num_members', ARGV[i + 1], 'ticket', ARGV[i + 2], 'max_attempts', ARGV[2],
      'num_stored', 0, 'opened_ms', now, 'changed_ms', now)
    if ARGV[i + 3] == '1' then redis.call('HSET', group_key(id), 'is_judged', 1) end
    redis.call('ZADD', base .. ':queued', id, id)
    num_opened = num_opened + 1
  end
end
redis.call('HSET', counters, 'last_group_id', last)
count('opened', num_opened)
count('queued', num_opened)
return num_opened
