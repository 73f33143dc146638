-- Makes ARGV[1] the owner, under the next epoch, unless another owner's lease is live by this server's clock; with
-- ARGV[4] = '1' even then.
-- KEYS: record, tokens, log probabilities.  ARGV: owner, lease ms, ttl ms, force, ttl ms of a finished session.
local held = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'lease', 'finished')
if not held[1] then
  return { 'MISSING' }
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[4] ~= '1' and held[2] ~= '' and held[2] ~= ARGV[1] and tonumber(held[3]) > now then
  return { 'HELD', held[2], string.format('%.0f', held[3] - now) }
end
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'lease', string.format('%.0f', now + ARGV[2]))
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, held[4] == '1' and ARGV[5] or ARGV[3])
end
return { 'OK', redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]) or '', redis.call('GET', KEYS[3]) or '' }
