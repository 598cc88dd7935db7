import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Drives Kafka: {@code servers} are its bootstrap servers. One topic with one partition for each "ledger", three
 * replicas, acks=all, min.insync.replicas=2. Whether a broker flushes before it answers is its own setting.
 */
public final class KafkaDrive implements Drive.Target {
  private static final TopicPartition FIRST = new TopicPartition("bench", 0);
  private static final Duration POLL = Duration.ofSeconds(1);
  private static final int RECORDS_MAX = 5000;

  private final String servers;
  private final KafkaProducer<byte[], byte[]> producer;
  private KafkaConsumer<byte[], byte[]> reader;

  private KafkaDrive(String servers, int partitions, int inFlight) throws Exception {
    this.servers = servers;
    Properties settings = new Properties();
    settings.put("bootstrap.servers", servers);
    try (Admin admin = Admin.create(settings)) {
      NewTopic topic = new NewTopic("bench", partitions, (short) 3);
      topic.configs(Map.of("min.insync.replicas", "2"));
      admin.createTopics(List.of(topic)).all().get();
    }
    settings.put("key.serializer", ByteArraySerializer.class.getName());
    settings.put("value.serializer", ByteArraySerializer.class.getName());
    settings.put("acks", "all");
    settings.put("linger.ms", inFlight == 1 ? "0" : "1");
    settings.put("batch.size", "262144");
    settings.put("buffer.memory", String.valueOf(256L << 20));
    settings.put("max.block.ms", "60000");
    producer = new KafkaProducer<>(settings);
  }

  @Override
  public CompletableFuture<?> add(int ledger, byte[] payload) {
    CompletableFuture<Void> done = new CompletableFuture<>();
    producer.send(
        new ProducerRecord<>("bench", ledger, null, payload),
        (written, error) -> {
          if (error == null) {
            done.complete(null);
          } else {
            done.completeExceptionally(error);
          }
        });
    return done;
  }

  private KafkaConsumer<byte[], byte[]> consumer() {
    Properties settings = new Properties();
    settings.put("bootstrap.servers", servers);
    settings.put("key.deserializer", ByteArrayDeserializer.class.getName());
    settings.put("value.deserializer", ByteArrayDeserializer.class.getName());
    settings.put("enable.auto.commit", "false");
    settings.put("max.poll.records", String.valueOf(RECORDS_MAX));
    KafkaConsumer<byte[], byte[]> made = new KafkaConsumer<>(settings);
    made.assign(List.of(FIRST));
    return made;
  }

  @Override
  public void beginReading() {
    reader = consumer();
  }

  @Override
  public long readAll(long entries) {
    reader.seekToBeginning(List.of(FIRST));
    long bytes = 0;
    for (long count = 0; count < entries; ) {
      for (ConsumerRecord<byte[], byte[]> found : reader.poll(POLL)) {
        if (count < entries) { // the last poll may bring more than was asked for
          bytes += found.value().length;
          count++;
        }
      }
    }
    return bytes;
  }

  @Override
  public void follow(Consumer<byte[]> seen) {
    KafkaConsumer<byte[], byte[]> follower = consumer();
    follower.seekToEnd(List.of(FIRST));
    follower.position(FIRST); // the end is looked up now, before the first append
    Thread thread =
        new Thread(
            () -> {
              while (true) {
                for (ConsumerRecord<byte[], byte[]> found : follower.poll(POLL)) {
                  seen.accept(found.value());
                }
              }
            });
    thread.setDaemon(true);
    thread.start();
  }

  @Override
  public int leader() throws Exception {
    Properties settings = new Properties();
    settings.put("bootstrap.servers", servers);
    try (Admin admin = Admin.create(settings)) {
      return admin
          .describeTopics(List.of("bench"))
          .allTopicNames()
          .get()
          .get("bench")
          .partitions()
          .get(0)
          .leader()
          .id();
    }
  }

  @Override
  public void close() {
    producer.close();
  }

  public static void main(String[] arguments) throws Exception {
    Drive.run(arguments, KafkaDrive::new);
  }
}
