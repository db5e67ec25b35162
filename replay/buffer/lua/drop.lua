-- drop: (epoch, last step that was made, reason, group ids ...). Drops groups in any state; their leases are lost.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
for i = 4, #ARGV do
  local state = state_of(ARGV[i])
  if state then
    must_be_sound(ARGV[i], state)
    leave(ARGV[i], state)
    take_back(ARGV[i], ARGV[2])
    drop(ARGV[i], ARGV[3])
  end
end
