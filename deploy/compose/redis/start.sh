set -eu
umask 077
cp /etc/tandem/redis/redis.conf /run/redis/redis.conf
chmod 0600 /run/redis/redis.conf
if [ -f /etc/tandem/secrets/redis-password ]; then
  password=$(cat /etc/tandem/secrets/redis-password)
  hex=$(printf %s "$password" | od -An -v -tx1 | tr -d ' \n' | sed 's/../\\x&/g')
  printf '\nrequirepass "%s"\n' "$hex" >> /run/redis/redis.conf
fi
exec redis-server /run/redis/redis.conf
