-- release: (group_id, fence, description of how the engine died, if it did). Queues a leased group again at once. No attempt is
-- counted, except one during which an engine has died before: it has failed, as the next engine would sample the same
-- tokens by the same seed.
local id, description = ARGV[1], ARGV[3] or ''
if #description > MAX_DESCRIPTION then return redis.error_reply('ERR malformed description') end

-- Counts the death for each missing member; returns whether one of them is out of attempts.
local function count_death()
  local group, num_failed, exhausted = group_key(id), 0, false
  for member = 0, size_of(id) - 1 do
    local attempt = redis.call('HGET', group, 'attempt:' .. member) or '0'
    if redis.call('HEXISTS', group, 'member:' .. member) == 0 then
      if redis.call('HGET', group, 'died:' .. member) ~= attempt then
        redis.call('HSET', group, 'died:' .. member, attempt)
      else
        num_failed = num_failed + 1
        remove_partial(id, member, 'discarded:infra_failure')
        redis.call('HSET', group, 'attempt:' .. member, attempt + 1)
        exhausted = exhausted or attempt + 1 >= tonumber(redis.call('HGET', group, 'max_attempts'))
      end
    end
  end
  if num_failed > 0 then
    count('failed:infra_failure', num_failed)
    count('redone_members', num_failed)
    note_failure(description)
  end
  return exhausted
end

if not holds('leased', id, ARGV[2]) then return end
local exhausted = description ~= '' and not flaw(id, 'leased') and count_death()
leave(id, 'leased')
if exhausted then drop(id, 'infra_failure') else enter(id, 'queued', id) end
