import java.lang.management.ManagementFactory;
import java.util.Locale;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.LongAdder;
import org.HdrHistogram.Histogram;
import org.HdrHistogram.Recorder;

/**
 * The load that all peers get, from one thread: a closed loop under a semaphore.
 *
 * <p>Arguments: servers, entry bytes, adds in flight (over all ledgers), ledgers, seconds of warm-up, seconds
 * measured, entries to write and read back (0: measure writing). An add's latency runs from the moment the
 * semaphore let it pass to its completion. Prints {@code warm} when the measured part begins, and the figures as
 * one line of JSON.
 */
public final class Drive {
  /** What is measured. */
  public interface Target extends AutoCloseable {
    /** Adds an entry to one of the ledgers. */
    CompletableFuture<?> add(int ledger, byte[] payload) throws Exception;

    /** Closes the first ledger, and gets ready to read what was added to it. */
    default void beginReading() throws Exception {
      throw new UnsupportedOperationException("this peer is measured writing only");
    }

    /** Reads all that was added to the first ledger, in order, and gives the number of bytes seen. */
    default long readAll(long entries) throws Exception {
      throw new UnsupportedOperationException("this peer is measured writing only");
    }
  }

  /** Makes the target once the arguments are known. */
  public interface Maker {
    Target make(String servers, int ledgers, int inFlight) throws Exception;
  }

  private Drive() {}

  public static void run(String[] arguments, Maker maker) throws Exception {
    String servers = arguments[0];
    int entryBytes = Integer.parseInt(arguments[1]);
    int inFlight = Integer.parseInt(arguments[2]);
    int ledgers = Integer.parseInt(arguments[3]);
    double warmUp = Double.parseDouble(arguments[4]);
    double seconds = Double.parseDouble(arguments[5]);
    long readEntries = Long.parseLong(arguments[6]);
    try {
      Target target = maker.make(servers, ledgers, inFlight);
      System.out.println("ready");
      String figures =
          readEntries > 0
              ? read(target, entryBytes, inFlight, readEntries, warmUp, seconds)
              : write(target, entryBytes, inFlight, ledgers, warmUp, seconds);
      System.out.println(figures);
      System.out.flush();
    } catch (Exception error) {
      // Else the threads of the client would keep the process, and whoever waits for it.
      error.printStackTrace();
      Runtime.getRuntime().halt(1);
    }
    // What is still in flight is not waited for, and neither are the threads of the client.
    Runtime.getRuntime().halt(0);
  }

  private static String write(
      Target target, int entryBytes, int inFlight, int ledgers, double warmUp, double seconds)
      throws Exception {
    byte[] payload = new byte[entryBytes];
    java.util.Arrays.fill(payload, (byte) 'x');
    Semaphore room = new Semaphore(inFlight);
    Recorder recorder = new Recorder(3);
    LongAdder failed = new LongAdder();
    LongAdder all = new LongAdder();
    long began = System.nanoTime();
    long warm = began + (long) (warmUp * 1e9);
    long end = warm + (long) (seconds * 1e9);
    boolean isWarm = false;
    long cpuBefore = 0;
    int ledger = 0;
    while (true) {
      room.acquire();
      long sent = System.nanoTime();
      if (!isWarm && sent >= warm) {
        isWarm = true;
        recorder.reset();
        failed.reset();
        cpuBefore = cpu();
        System.out.println("warm");
      }
      if (sent >= end) {
        break;
      }
      target
          .add(ledger, payload)
          .whenComplete(
              (done, error) -> {
                all.increment();
                if (error != null) {
                  failed.increment();
                } else {
                  recorder.recordValue(System.nanoTime() - sent);
                }
                room.release();
              });
      ledger = ledger + 1 == ledgers ? 0 : ledger + 1;
    }
    Histogram found = recorder.getIntervalHistogram();
    long used = cpu() - cpuBefore;
    double elapsed = (System.nanoTime() - warm) / 1e9;
    return figures(found, found.getTotalCount(), elapsed, used, failed.sum(), all.sum());
  }

  private static String read(
      Target target, int entryBytes, int inFlight, long entries, double warmUp, double seconds)
      throws Exception {
    byte[] payload = new byte[entryBytes];
    Semaphore room = new Semaphore(inFlight);
    LongAdder failed = new LongAdder();
    for (long number = 0; number < entries; number++) {
      room.acquire();
      target
          .add(0, payload)
          .whenComplete(
              (done, error) -> {
                if (error != null) {
                  failed.increment();
                }
                room.release();
              });
    }
    room.acquire(inFlight);
    if (failed.sum() > 0) {
      throw new IllegalStateException(failed.sum() + " adds failed");
    }
    target.beginReading();
    long until = System.nanoTime() + (long) (warmUp * 1e9);
    while (System.nanoTime() < until) {
      checkedRead(target, entries, entryBytes);
    }
    System.out.println("warm");
    // Each pass over the ledger is one value: its entries divided by its time are the rate.
    Histogram found = new Histogram(3);
    long began = System.nanoTime();
    long cpuBefore = cpu();
    long passes = 0;
    while (System.nanoTime() < began + (long) (seconds * 1e9)) {
      long before = System.nanoTime();
      checkedRead(target, entries, entryBytes);
      found.recordValue(System.nanoTime() - before);
      passes++;
    }
    double elapsed = (System.nanoTime() - began) / 1e9;
    return figures(found, passes * entries, elapsed, cpu() - cpuBefore, 0, passes * entries);
  }

  private static void checkedRead(Target target, long entries, int entryBytes) throws Exception {
    long found = target.readAll(entries);
    if (found != entries * entryBytes) {
      throw new IllegalStateException("read " + found + " bytes of " + entries * entryBytes);
    }
  }

  private static long cpu() {
    return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
        .getProcessCpuTime();
  }

  private static String figures(
      Histogram found, long done, double elapsed, long cpuNanos, long failed, long all) {
    return String.format(
        Locale.ROOT,
        "{\"adds_per_s\": %.1f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f, \"client_us\": %.3f,"
            + " \"adds\": %d, \"failed\": %d, \"adds_with_warm_up\": %d}",
        done / elapsed,
        found.getValueAtPercentile(50) / 1e6,
        found.getValueAtPercentile(99) / 1e6,
        found.getValueAtPercentile(99.9) / 1e6,
        cpuNanos / 1e3 / Math.max(1, done),
        done,
        failed,
        all);
  }
}
