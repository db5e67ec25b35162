-- fail: (group_id, member, attempt, fence, outcome, description) -> the attempt to make next, if there is one.
local id, member, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
local group = group_key(id)
if not holds(id, ARGV[4]) or redis.call('HEXISTS', group, 'member:' .. member) == 1 then return false end
local current = tonumber(redis.call('HGET', group, 'attempt:' .. member) or '0')
if current ~= attempt then return current end -- the reply to an earlier try was lost

count('failed:' .. ARGV[5], 1)
remove_partial(id, member, 'discarded:' .. ARGV[5])
redis.call('LPUSH', base .. ':failures', ARGV[6])
redis.call('LTRIM', base .. ':failures', 0, 99)
if attempt + 1 >= tonumber(redis.call('HGET', group, 'max_attempts')) then
  leave(id, 'leased')
  drop(id, ARGV[5])
  return false
end
count('redone_members', 1)
redis.call('HSET', group, 'attempt:' .. member, attempt + 1)
return attempt + 1
