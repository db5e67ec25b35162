-- fail: (group_id, member, attempt, fence, outcome, description) -> the number of the next attempt; false if there is
-- none.
local OUTCOMES = { truncated = true, env_failure = true, infra_failure = true, preempted = true, replay_mismatch = true }
local id, member, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
local group = group_key(id)
if not OUTCOMES[ARGV[5]] then return redis.error_reply('ERR malformed outcome') end
if #ARGV[6] > MAX_DESCRIPTION then return redis.error_reply('ERR malformed description') end
if not holds('leased', id, ARGV[4]) or flaw(id, 'leased') then return false end
if redis.call('HEXISTS', group, 'member:' .. member) == 1 then return false end
if not is_member(member, size_of(id)) then return redis.error_reply('ERR malformed member') end
local current = tonumber(redis.call('HGET', group, 'attempt:' .. member) or '0')
if current ~= attempt then return current end -- this call was made before, and its reply was lost

count('failed:' .. ARGV[5], 1)
remove_partial(id, member, 'discarded:' .. ARGV[5])
note_failure(ARGV[6])
if attempt + 1 >= tonumber(redis.call('HGET', group, 'max_attempts')) then
  leave(id, 'leased')
  drop(id, ARGV[5])
  return false
end
count('redone_members', 1)
redis.call('HSET', group, 'attempt:' .. member, attempt + 1)
return attempt + 1
