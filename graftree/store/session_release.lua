-- Gives the session up, if ARGV[1] is still its epoch: anyone may acquire it at once.
-- KEYS: record.  ARGV: epoch.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'owner', '', 'lease', '0')
return 1
